// Adds down rows to a token's sum, several at a time.
#pragma once

#include <algorithm>

#include "pi2/kernels.h"

namespace pi2 {

// Adds rows in order of arrival, kAxpyRows at a time. A group waits until the next one is complete, so that its rows
// are prefetched while the group before is added: only rows of neurons that fire are prefetched.
class DownQueue {
 public:
  void add(AxpyFn axpy, std::int64_t n, const void* row, float h, float* y) {
    const std::int64_t at = (first_ + filled_) % (2 * kAxpyRows);
    rows_[at] = row;
    h_[at] = h;
    if (++filled_ < 2 * kAxpyRows) return;
    const std::int64_t other = kAxpyRows - first_;
    axpy(y, rows_ + first_, h_ + first_, kAxpyRows, n, rows_ + other);
    first_ = other;
    filled_ -= kAxpyRows;
  }

  void flush(AxpyFn axpy, std::int64_t n, float* y) {
    for (; filled_ > 0; filled_ -= std::min(kAxpyRows, filled_), first_ = kAxpyRows - first_)
      axpy(y, rows_ + first_, h_ + first_, std::min(kAxpyRows, filled_), n, nullptr);
    first_ = 0;
  }

 private:
  // Two groups in turn; the older one begins at first_.
  const void* rows_[2 * kAxpyRows];
  float h_[2 * kAxpyRows];
  std::int64_t first_ = 0, filled_ = 0;
};

}  // namespace pi2
