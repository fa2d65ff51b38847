// Adds the partial sums of chunks, in their order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "pi2/kernels.h"

namespace pi2 {

constexpr std::int64_t kReduceColumns = 1024;

// [chunks, tokens, width], of which only those that are `used` were written.
struct ChunkSums {
  const float* partials;
  const std::uint8_t* used;  // [chunks]
  std::int64_t chunks, tokens, width;

  std::int64_t blocks() const { return (width + kReduceColumns - 1) / kReduceColumns; }

  // y[:, block of columns] = the sum over chunks. `add`: axpy of float32.
  void reduce(AxpyFn add, std::int64_t block, float* y_TW) const {
    const std::int64_t begin = block * kReduceColumns, columns = std::min(kReduceColumns, width - begin);
    for (std::int64_t t = 0; t < tokens; ++t) {
      float* y = y_TW + t * width + begin;
      std::memset(y, 0, static_cast<std::size_t>(columns) * sizeof(float));
      // y += 1 * part is exact, so the axpy kernel adds four partial sums per pass over y.
      const float ones[kAxpyRows] = {1, 1, 1, 1};
      const void* parts[kAxpyRows];
      std::int64_t filled = 0;
      for (std::int64_t c = 0; c < chunks; ++c) {
        if (!used[c]) continue;
        parts[filled] = partials + (c * tokens + t) * width + begin;
        if (++filled == kAxpyRows) {
          add(y, parts, ones, filled, columns, nullptr);
          filled = 0;
        }
      }
      if (filled > 0) add(y, parts, ones, filled, columns, nullptr);
    }
  }
};

}  // namespace pi2
