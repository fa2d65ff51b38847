// Deterministic random data in every stored format.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/scalar/convert.h"
#include "pi2/types.h"

namespace pi2_test {

inline float normal(std::mt19937& rng) { return std::normal_distribution<float>(0, 1)(rng); }

inline std::vector<float> floats(std::mt19937& rng, std::int64_t n) {
  std::vector<float> out(static_cast<std::size_t>(n));
  for (float& v : out) v = normal(rng);
  return out;
}

// `n` stored numbers; one in 17 is a subnormal of its format, and fp16 and bf16 are rounded to nearest even.
inline std::vector<char> stored(std::mt19937& rng, pi2::DType dtype, std::int64_t n, float scale = 1) {
  const std::int64_t bytes = pi2::dtype_bytes(dtype);
  std::vector<char> out(static_cast<std::size_t>(n * bytes));
  for (std::int64_t i = 0; i < n; ++i) {
    const float value = normal(rng) * scale * (i % 17 == 16 ? 1e-39f : 1.0f);
    const std::uint16_t half = dtype == pi2::DType::kBF16 ? pi2::narrow_bf16(value) : pi2::narrow_f16(value);
    const auto byte = static_cast<std::int8_t>(static_cast<int>(rng() % 255) - 127);
    const void* from = dtype == pi2::DType::kF32  ? static_cast<const void*>(&value)
                       : dtype == pi2::DType::kI8 ? static_cast<const void*>(&byte)
                                                  : static_cast<const void*>(&half);
    std::memcpy(&out[static_cast<std::size_t>(i * bytes)], from, static_cast<std::size_t>(bytes));
  }
  return out;
}

}  // namespace pi2_test
