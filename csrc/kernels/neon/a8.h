// Int8 activations on NEON: a float scale per group of 32, integer sums exact. `Products` is how bytes are multiplied;
// it changes speed and no bit, because every group is summed to one integer before it becomes a float.
//
// A prepared x is padded(n) values in plain order and then a scale for each of their groups (0 past the end).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/neon/impl.h"

namespace pi2::neon {
namespace {

constexpr std::int64_t kStepGroups = 4;

// One group as int8 (room for 32); returns its scale. The policy is that of scalar::prepare_a8.
inline float quantize_group(const float* x, std::int64_t count, std::int8_t* out) {
  float group[kGroup] = {};
  std::memcpy(group, x, static_cast<std::size_t>(count) * sizeof(float));
  float32x4_t v[8];
  float32x4_t most = vdupq_n_f32(0);  // FMAX keeps a NaN
  for (int j = 0; j < 8; ++j) {
    v[j] = vld1q_f32(group + 4 * j);
    most = vmaxq_f32(most, vabsq_f32(v[j]));
  }
  const float largest = vmaxvq_f32(most);
  if (!std::isfinite(largest)) {
    std::memset(out, 0, kGroup);
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
  const float32x4_t by = vdupq_n_f32(std::isfinite(inverse) ? inverse : 0.0f);
  for (int j = 0; j < 8; j += 2) {
    const int16x4_t low = vmovn_s32(vcvtnq_s32_f32(vmulq_f32(v[j], by)));
    const int16x4_t high = vmovn_s32(vcvtnq_s32_f32(vmulq_f32(v[j + 1], by)));
    vst1_s8(out + 4 * j, vmovn_s16(vcombine_s16(low, high)));
  }
  return largest / 127.0f;
}

inline void prepare_a8(PI2_PREPARE_ARGS) {
  auto* values = static_cast<std::int8_t*>(out);
  auto* scales = reinterpret_cast<float*>(values + padded(n));
  for (std::int64_t g = 0; g < padded(n) / kGroup; ++g) {
    const std::int64_t begin = g * kGroup;
    if (begin < n) {
      scales[g] = quantize_group(x + begin, std::min(n - begin, kGroup), values + begin);
    } else {
      std::memset(values + begin, 0, kGroup);
      scales[g] = 0;
    }
  }
}

// A group of weights as signed bytes: the first and the second half.
struct Group {
  int8x16_t first, second;
};

struct Q4Bytes {
  static constexpr std::int64_t kBytes = kGroup / 2;
  static Group load(const char* p) {
    const uint8x16_t bytes = vld1q_u8(reinterpret_cast<const std::uint8_t*>(p));
    const int8x16_t offset = vdupq_n_s8(8);
    return {vsubq_s8(vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15))), offset),
            vsubq_s8(vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4)), offset)};
  }
};

struct Q8Bytes {
  static constexpr std::int64_t kBytes = kGroup;
  static Group load(const char* p) {
    const auto* values = reinterpret_cast<const std::int8_t*>(p);
    return {vld1q_s8(values), vld1q_s8(values + 16)};
  }
};

// Lanes that add up to w . x. Two products fit into 16 bits (2 * 128 * 127 = 32512), four would not.
struct WideningProducts {
  static int32x4_t sum(int8x16_t w, int8x16_t x) {
    return vpaddlq_s16(vmlal_high_s8(vmull_s8(vget_low_s8(w), vget_low_s8(x)), w, x));
  }
  static int32x4_t sum(const Group& w, const Group& x) {
    const int16x8_t first = vmlal_high_s8(vmull_s8(vget_low_s8(w.first), vget_low_s8(x.first)), w.first, x.first);
    const int16x8_t second = vmlal_high_s8(vmull_s8(vget_low_s8(w.second), vget_low_s8(x.second)), w.second, x.second);
    return vpadalq_s16(vpaddlq_s16(first), second);
  }
};

// Four groups of a row, whose end may come earlier: then the values and scales are those of a copy with zeros.
template <class Format>
struct Step {
  const char* values;
  const char* scales;
  char padded_values[kStepGroups * Format::kBytes];
  char padded_scales[kStepGroups * 2];

  void at(const char* row, std::int64_t g, std::int64_t n_groups) {
    values = row + g * Format::kBytes;
    scales = row + n_groups * Format::kBytes + 2 * g;
    const std::int64_t left = n_groups - g;
    if (left >= kStepGroups) return;
    std::memset(padded_values, 0, sizeof(padded_values));
    std::memset(padded_scales, 0, sizeof(padded_scales));
    std::memcpy(padded_values, values, static_cast<std::size_t>(left * Format::kBytes));
    std::memcpy(padded_scales, scales, static_cast<std::size_t>(left * 2));
    values = padded_values;
    scales = padded_scales;
  }
  Group group(int i) const { return Format::load(values + i * Format::kBytes); }
  float32x4_t scale() const {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(reinterpret_cast<const std::uint8_t*>(scales))));
  }
};

// Four groups of a prepared x.
struct Input {
  const std::int8_t* values;
  const float* scales;

  void start(const void* x, std::int64_t n) {
    values = static_cast<const std::int8_t*>(x);
    scales = reinterpret_cast<const float*>(values + padded(n));
  }
  void next() {
    values += kStepGroups * kGroup;
    scales += kStepGroups;
  }
  Group group(int i) const { return {vld1q_s8(values + kGroup * i), vld1q_s8(values + kGroup * i + 16)}; }
  float32x4_t scale() const { return vld1q_f32(scales); }
};

// The float part, the same for every way of summing: lane i of `sums` is the i-th group's exact sum.
inline float32x4_t add_groups(float32x4_t acc, int32x4_t sums, float32x4_t w_scale, float32x4_t x_scale) {
  return vfmaq_f32(acc, vmulq_f32(w_scale, x_scale), vcvtq_f32_s32(sums));
}

template <class Format, class Products, int kRows, int kTokens>
inline void dot_a8_tile(const void* const* rows, const void* const* x_T, std::int64_t n, float* out, std::int64_t ldo,
                        const void* const* next, std::int64_t pace) {
  const std::int64_t n_groups = groups(n);
  NextRows<Simd, kRows> ahead{next, pace};
  Step<Format> w[kRows];
  Input x[kTokens];
  float32x4_t acc[kRows][kTokens];
  for (int t = 0; t < kTokens; ++t) x[t].start(x_T[t], n);
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t) acc[r][t] = vdupq_n_f32(0);
  for (std::int64_t g = 0; g < n_groups; g += kStepGroups) {
    ahead.step();
    for (int r = 0; r < kRows; ++r) w[r].at(static_cast<const char*>(rows[r]), g, n_groups);
    int32x4_t sums[kRows][kTokens][kStepGroups];
    for (int i = 0; i < kStepGroups; ++i) {
      Group weights[kRows];
      for (int r = 0; r < kRows; ++r) weights[r] = w[r].group(i);
      for (int t = 0; t < kTokens; ++t) {
        const Group values = x[t].group(i);
        for (int r = 0; r < kRows; ++r) sums[r][t][i] = Products::sum(weights[r], values);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTokens; ++t) {
        const int32x4_t* s = sums[r][t];
        acc[r][t] = add_groups(acc[r][t], vpaddq_s32(vpaddq_s32(s[0], s[1]), vpaddq_s32(s[2], s[3])), w[r].scale(),
                               x[t].scale());
      }
    }
    for (int t = 0; t < kTokens; ++t) x[t].next();
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t) out[r * ldo + t] = vaddvq_f32(acc[r][t]);
}

template <class Format, class Products>
inline void dot_a8(PI2_DOT_ARGS) {
  const std::int64_t steps = (groups(n) + kStepGroups - 1) / kStepGroups;
  return over_rows<over_tokens<4, dot_a8_tile<Format, Products, 1, 4>, dot_a8_tile<Format, Products, 1, 1>>,
                   over_tokens<2, dot_a8_tile<Format, Products, 2, 2>, dot_a8_tile<Format, Products, 2, 1>>>(
      rows, count, x_T, tokens, n, out_RT, next, groups(n) * (Format::kBytes + 2), steps);
}

}  // namespace
}  // namespace pi2::neon
