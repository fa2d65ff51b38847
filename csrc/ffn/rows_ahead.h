// Contiguous rows for dot, and the rows further on that a later call will read.
#pragma once

#include <cstdint>

#include "pi2/kernels.h"

namespace pi2 {

struct RowsAhead {
  const void *now[kDotRows], *later[kDotRows];
  const bool more;

  // `count` rows of `bytes` from `row` on; `more`: there are as many rows `ahead` rows further on.
  RowsAhead(const char* row, std::int64_t bytes, std::int64_t count, std::int64_t ahead, bool more_) : more(more_) {
    for (std::int64_t k = 0; k < count; ++k, row += bytes) {
      now[k] = row;
      if (more) later[k] = row + ahead * bytes;
    }
  }

  // The `next` argument of dot.
  const void* const* next() const { return more ? later : nullptr; }
};

}  // namespace pi2
