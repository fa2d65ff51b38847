// Prefetch hints of kernels over rows. `Simd` only keeps the instances of instruction sets apart.
#pragma once

#include <cstdint>

namespace pi2 {

// Asks for a line that is wanted microseconds later. On x86 into the second-level cache: the first one has some 24
// lines under way at a time, with which a thread reads gathered rows at half of the speed (measured on Zen 4).
__attribute__((always_inline)) inline void fetch(const void* line) {
#if defined(PI2_HAVE_X86)
  __builtin_prefetch(line, 0, 2);
#else
  __builtin_prefetch(line);
#endif
}

// Prefetches the bytes [begin, end) of each of kRows rows.
template <class Simd, int kRows>
inline void fetch_rows(const void* const* next, std::int64_t begin, std::int64_t end) {
  for (std::int64_t at = begin; at < end; at += 64)
    for (int r = 0; r < kRows; ++r) fetch(static_cast<const char*>(next[r]) + at);
}

// Prefetches rows that a later call will read: `pace` bytes of each at every step of this one.
template <class Simd, int kRows>
struct NextRows {
  const void* const* next;  // kRows of them, if pace > 0
  std::int64_t pace, at = 0, end = 0;

  void step() {
    for (end += pace; at < end; at += 64) fetch_rows<Simd, kRows>(next, at, at + 1);
  }
};

}  // namespace pi2
