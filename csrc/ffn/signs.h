// Sign bits of a row of numbers.
#pragma once

#include <cstdint>

namespace pi2 {

// Packs the signs of x[0, n) as described in pi2/predict.h; returns whether any number is NaN.
inline bool pack_signs(const float* x, std::int64_t n, std::uint64_t* words) {
  bool nan = false;
  for (std::int64_t begin = 0; begin < n; begin += 64) {
    const std::int64_t count = n - begin < 64 ? n - begin : 64;
    std::uint64_t word = 0;
    for (std::int64_t k = 0; k < count; ++k) {
      word |= static_cast<std::uint64_t>(x[begin + k] < 0) << k;
      nan |= x[begin + k] != x[begin + k];
    }
    words[begin / 64] = word;  // little-endian, as everything this library runs on: bit k is bit k % 8 of byte k / 8
  }
  return nan;
}

}  // namespace pi2
