// Time spent in the core, by kind and size of layer.
#pragma once

#include <cstdint>

namespace pi2 {

struct Timing {
  std::int64_t kind = 0;  // 0 linear, 1 predictor, 2 ffn
  std::int64_t rows = 0;  // of a linear layer; a predictor's cold neurons; an FFN's neurons
  std::int64_t columns = 0;
  std::int64_t calls = 0;
  std::int64_t nanoseconds = 0;  // wall clock, summed over calls
};

constexpr std::int64_t kTimings = 256;  // distinct sizes; further ones are counted under (kind 3, 0, 0)

// Writes the timings since the last reset to out[0, kTimings), in no particular order; returns their number.
std::int64_t read_timings(Timing* out);
void reset_timings();

}  // namespace pi2
