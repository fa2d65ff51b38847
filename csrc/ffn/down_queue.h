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
    rows_[filled_] = row;
    h_[filled_++] = h;
    if (filled_ < 2 * kAxpyRows) return;
    axpy(y, rows_, h_, kAxpyRows, n, rows_ + kAxpyRows);
    std::copy(rows_ + kAxpyRows, rows_ + filled_, rows_);
    std::copy(h_ + kAxpyRows, h_ + filled_, h_);
    filled_ -= kAxpyRows;
  }

  void flush(AxpyFn axpy, std::int64_t n, float* y) {
    for (std::int64_t first = 0; first < filled_; first += kAxpyRows)
      axpy(y, rows_ + first, h_ + first, std::min(kAxpyRows, filled_ - first), n, nullptr);
    filled_ = 0;
  }

 private:
  const void* rows_[2 * kAxpyRows];
  float h_[2 * kAxpyRows];
  std::int64_t filled_ = 0;
};

}  // namespace pi2
