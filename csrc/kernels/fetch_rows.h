// The prefetch hint of an axpy over quantised rows.
#pragma once

#include <cstdint>

namespace pi2 {

// Asks for the bytes [begin, end) of each of kRows rows. `Simd` only keeps the instances of instruction sets apart.
template <class Simd, int kRows>
inline void fetch_rows(const void* const* next, std::int64_t begin, std::int64_t end) {
  for (std::int64_t at = begin; at < end; at += 64)
    for (int r = 0; r < kRows; ++r) __builtin_prefetch(static_cast<const char*>(next[r]) + at);
}

}  // namespace pi2
