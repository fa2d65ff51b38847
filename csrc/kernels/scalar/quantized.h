// Quantised rows, one weight at a time: the meaning of the formats, and the reference of every other instruction set.
// Prepared float inputs are in plain order; prepared int8 inputs are padded(n) values and then a scale per group.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/scalar/convert.h"
#include "pi2/kernels.h"

namespace pi2::scalar {

struct Q4 {
  static constexpr DType kDType = DType::kQ4;
  // Weight k of group g, an integer in [-8, 7].
  static int at(const void* row, std::int64_t g, std::int64_t k) {
    const auto byte = static_cast<const std::uint8_t*>(row)[g * (kGroup / 2) + k % (kGroup / 2)];
    return (k < kGroup / 2 ? byte & 15 : byte >> 4) - 8;
  }
};

struct Q8 {
  static constexpr DType kDType = DType::kQ8;
  static int at(const void* row, std::int64_t g, std::int64_t k) {
    return static_cast<const std::int8_t*>(row)[g * kGroup + k];
  }
};

template <class Format>
inline float scale_of(const void* row, std::int64_t n, std::int64_t g) {
  std::uint16_t half;
  std::memcpy(&half, static_cast<const char*>(row) + row_bytes(Format::kDType, n) - 2 * (groups(n) - g), sizeof(half));
  return F16::widen(half);
}

inline void prepare(PI2_PREPARE_ARGS) {
  auto* values = static_cast<float*>(out);
  std::memcpy(values, x, static_cast<std::size_t>(n) * sizeof(float));
  std::memset(values + n, 0, static_cast<std::size_t>(padded(n) - n) * sizeof(float));
}

inline void restore(PI2_RESTORE_ARGS) { std::memcpy(out, y, static_cast<std::size_t>(n) * sizeof(float)); }

// One group as int8 (room for 32, zero); returns its scale, its largest magnitude / 127. A group with a NaN or an
// infinity has a NaN scale, so that broken inputs stay visible. Rounds to nearest even, as the vector instructions do.
inline float quantize_group(const float* x, std::int64_t count, std::int8_t* out) {
  float largest = 0;
  bool finite = true;
  for (std::int64_t k = 0; k < count; ++k) {
    largest = std::max(largest, std::fabs(x[k]));
    finite = finite && std::isfinite(x[k]);
  }
  const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
  const bool usable = finite && std::isfinite(inverse);  // below about 4e-37 the group counts as zero
  for (std::int64_t k = 0; k < count && usable; ++k) out[k] = static_cast<std::int8_t>(std::nearbyint(x[k] * inverse));
  return finite ? largest / 127.0f : NAN;
}

inline void prepare_a8(PI2_PREPARE_ARGS) {
  auto* values = static_cast<std::int8_t*>(out);
  auto* scales = reinterpret_cast<float*>(values + padded(n));
  std::memset(values, 0, static_cast<std::size_t>(padded(n)));
  for (std::int64_t g = 0; g < groups(n); ++g)
    scales[g] = quantize_group(x + g * kGroup, std::min(n - g * kGroup, kGroup), values + g * kGroup);
}

template <class Format>
inline void dot_quantized(PI2_DOT_ARGS) {
  (void)next;
  for (std::int64_t r = 0; r < count; ++r) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* x = static_cast<const float*>(x_T[t]);
      float total[4] = {0, 0, 0, 0};
      for (std::int64_t g = 0; g < groups(n); ++g) {
        float sum[4] = {0, 0, 0, 0};
        for (std::int64_t k = 0; k < kGroup; ++k)
          sum[k % 4] += static_cast<float>(Format::at(rows[r], g, k)) * x[g * kGroup + k];
        total[g % 4] += scale_of<Format>(rows[r], n, g) * ((sum[0] + sum[1]) + (sum[2] + sum[3]));
      }
      out_RT[r * tokens + t] = (total[0] + total[1]) + (total[2] + total[3]);
    }
  }
}

template <class Format>
inline void dot_a8(PI2_DOT_ARGS) {
  (void)next;
  for (std::int64_t r = 0; r < count; ++r) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      const auto* x = static_cast<const std::int8_t*>(x_T[t]);
      const auto* x_scales = reinterpret_cast<const float*>(x + padded(n));
      float total[4] = {0, 0, 0, 0};
      for (std::int64_t g = 0; g < groups(n); ++g) {
        int sum = 0;
        for (std::int64_t k = 0; k < kGroup; ++k) sum += Format::at(rows[r], g, k) * x[g * kGroup + k];
        total[g % 4] += scale_of<Format>(rows[r], n, g) * x_scales[g] * static_cast<float>(sum);
      }
      out_RT[r * tokens + t] = (total[0] + total[1]) + (total[2] + total[3]);
    }
  }
}

template <class Format>
inline void axpy_quantized(PI2_AXPY_ARGS) {
  (void)next;
  for (std::int64_t r = 0; r < count; ++r) {
    for (std::int64_t g = 0; g < groups(n); ++g) {
      const float scale = h[r] * scale_of<Format>(rows[r], n, g);
      for (std::int64_t k = 0; k < kGroup; ++k)
        y[g * kGroup + k] += scale * static_cast<float>(Format::at(rows[r], g, k));
    }
  }
}

}  // namespace pi2::scalar
