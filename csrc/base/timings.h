// Adds the lifetime of a Timed to pi2::read_timings: one at the top of each public function of the core.
#pragma once

#include <chrono>
#include <cstdint>

#include "pi2/timings.h"

namespace pi2 {

// Adds one call. Any thread; lock-free.
void add_timing(std::int64_t kind, std::int64_t rows, std::int64_t columns, std::int64_t nanoseconds);

class Timed {
 public:
  enum Kind : std::int64_t { kLinear = 0, kPredictor = 1, kFfn = 2 };

  Timed(Kind kind, std::int64_t rows, std::int64_t columns)
      : kind_(kind), rows_(rows), columns_(columns), start_(std::chrono::steady_clock::now()) {}
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;
  ~Timed() {
    const auto taken = std::chrono::steady_clock::now() - start_;
    add_timing(kind_, rows_, columns_, std::chrono::duration_cast<std::chrono::nanoseconds>(taken).count());
  }

 private:
  Kind kind_;
  std::int64_t rows_, columns_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace pi2
