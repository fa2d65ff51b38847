// Deterministic random data in every stored format.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "base/convert.h"
#include "kernels/scalar/convert.h"
#include "pi2/attention.h"
#include "pi2/linear.h"
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
  const std::int64_t bytes = pi2::row_bytes(dtype, 1);
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

// A quantised row: any values, also the most negative, and scales of which one in four is a subnormal half, one in
// eight zero and some negative. What pads the last group is zero, as the format says.
inline std::vector<char> quantized_row(std::mt19937& rng, pi2::DType dtype, std::int64_t n) {
  std::vector<char> out(static_cast<std::size_t>(pi2::row_bytes(dtype, n)));
  for (char& byte : out) byte = static_cast<char>(rng() % 256);
  const auto put_scale = [&](char* at) {
    const unsigned kind = rng() % 8;
    const float scale = kind == 0 ? 0.0f : kind <= 2 ? normal(rng) * 1e-5f : normal(rng) * 0.05f;
    const std::uint16_t half = pi2::narrow_f16(scale);
    std::memcpy(at, &half, sizeof(half));
  };
  if (pi2::is_ggml(dtype)) {
    const std::int64_t block = pi2::ggml_block(dtype).bytes;
    for (char* at = out.data(); at < out.data() + out.size(); at += block) {
      const bool last = dtype == pi2::DType::kQ6K || dtype == pi2::DType::kTQ2;
      put_scale(at + (last ? block - 2 : 0));
      if (!last && dtype != pi2::DType::kQ5_0) put_scale(at + 2);
    }
    return out;
  }
  for (std::int64_t k = n; k < pi2::groups(n) * pi2::kGroup; ++k) {
    const std::int64_t g = k / pi2::kGroup, i = k % pi2::kGroup;
    if (dtype == pi2::DType::kQ8) out[k] = 0;
    if (dtype == pi2::DType::kQ4) {
      char& byte = out[g * 16 + i % 16];
      byte = static_cast<char>(i < 16 ? (byte & 0xf0) | 8 : (byte & 0x0f) | 0x80);
    }
  }
  char* scales = out.data() + out.size() - 2 * pi2::groups(n);
  for (std::int64_t g = 0; g < pi2::groups(n); ++g) put_scale(scales + 2 * g);
  return out;
}

// Its weights as types.h defines them; of ggml's blocks as dequantize has them, which Python compares with another
// reader of theirs.
inline std::vector<double> weights_of(const std::vector<char>& row, pi2::DType dtype, std::int64_t n) {
  std::vector<double> out;
  if (pi2::is_ggml(dtype)) {
    std::vector<float> values(static_cast<std::size_t>(n));
    pi2::dequantize(row.data(), dtype, 1, n, 0, values.data(), pi2::DType::kF32, pi2::serial());
    return {values.begin(), values.end()};
  }
  const char* scales = row.data() + row.size() - 2 * pi2::groups(n);
  for (std::int64_t k = 0; k < n; ++k) {
    const std::int64_t g = k / 32, i = k % 32;
    std::uint16_t half;
    std::memcpy(&half, scales + 2 * g, sizeof(half));
    const auto byte = static_cast<std::uint8_t>(dtype == pi2::DType::kQ4 ? row[g * 16 + i % 16] : row[g * 32 + i]);
    const int value = dtype == pi2::DType::kQ4 ? (i < 16 ? byte % 16 : byte / 16) - 8 : static_cast<std::int8_t>(byte);
    out.push_back(static_cast<double>(pi2::F16::widen(half)) * value);
  }
  return out;
}

// Rows of keys or values as a cache has them: those of whole numbers end with their scale.
inline std::vector<char> kv_rows(std::mt19937& rng, pi2::DType dtype, std::int64_t rows, std::int64_t width) {
  if (dtype != pi2::DType::kI8 && dtype != pi2::DType::kQ4) return stored(rng, dtype, rows * width);
  std::vector<char> out;
  for (std::int64_t i = 0; i < rows; ++i) {
    if (dtype == pi2::DType::kQ4) {
      const std::vector<char> row = quantized_row(rng, dtype, width);
      out.insert(out.end(), row.begin(), row.end());
      continue;
    }
    const std::vector<char> row = stored(rng, dtype, width);
    const float scale = i % 9 == 8 ? 0.0f : std::fabs(normal(rng)) / 128;
    const char* bytes = reinterpret_cast<const char*>(&scale);
    out.insert(out.end(), row.begin(), row.end());
    out.insert(out.end(), bytes, bytes + pi2::kKvScaleBytes);
  }
  return out;
}

// Number k of such a row.
inline double kv_number(const char* row, pi2::DType dtype, std::int64_t width, std::int64_t k) {
  if (dtype == pi2::DType::kQ4) {
    const int byte = static_cast<std::uint8_t>(row[k / 32 * 16 + k % 16]),
              value = (k % 32 < 16 ? byte & 15 : byte >> 4) - 8;
    return static_cast<double>(value) * pi2::load_float(row + pi2::groups(width) * 16, pi2::DType::kF16, k / 32);
  }
  float scale = 1;
  if (dtype == pi2::DType::kI8) std::memcpy(&scale, row + width, sizeof(scale));
  return static_cast<double>(pi2::load_float(row, dtype, k)) * scale;
}

}  // namespace pi2_test
