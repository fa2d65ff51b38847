// AVX-512 VNNI kernels: int8 activations with a float scale per group of 32, integer sums exact.
//
// VPDPBUSD multiplies unsigned by signed bytes, so stored weights go in with an offset (8 for int4, 128 for int8) and
// of each group one accumulator starts at minus the offset times the x it will meet. A prepared x is small, since a
// batch reads it from the second-level cache for every neuron: values in the order of a step (int4, 128 weights: 64 for
// the low nibbles, 64 for the high ones; int8: 64 weights), padded(n) of them, then for each step its groups' scales
// and starts.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/avx512/quantized.h"

// Unnamed: functions that are compiled with other flags elsewhere must stay apart (the linker would keep one of them).
namespace pi2::avx512vnni {
namespace {

using avx512::kStep;

template <int kGroups>
struct StepScales {
  float scale[kGroups];
  std::int32_t start[kGroups];
};
using ScalesQ4 = StepScales<4>;
using ScalesQ8 = StepScales<2>;

// Parts of a prepared x.
template <class Scales>
struct StepInput {
  const std::int8_t* values;
  const Scales* scales;

  StepInput(const void* x, std::int64_t n)
      : values(static_cast<const std::int8_t*>(x)), scales(reinterpret_cast<const Scales*>(values + padded(n))) {}
};

// Scales over the lanes of their groups, and the starts, each in one lane of its group.
inline void spread(const ScalesQ4& step, __m512* scale, __m512i* start) {
  const __m512i group = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  const __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(&step)));
  *scale = _mm512_permutexvar_ps(group, _mm512_castsi512_ps(both));
  *start = _mm512_maskz_permutexvar_epi32(0x1111, _mm512_add_epi32(group, _mm512_set1_epi32(4)), both);
}

inline void spread(const ScalesQ8& step, __m512* scale, __m512i* start) {
  const __m512i group = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512i both = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(&step)));
  *scale = _mm512_permutexvar_ps(group, _mm512_castsi512_ps(both));
  *start = _mm512_maskz_permutexvar_epi32(0x0101, _mm512_add_epi32(group, _mm512_set1_epi32(2)), both);
}

// One group as int8 (room for 32); returns its scale. The policy is that of scalar::prepare_a8.
inline float quantize_group(const float* x, std::int64_t count, std::int8_t* out) {
  const __mmask16 m0 = count >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << count) - 1u);
  const __mmask16 m1 = count >= 32   ? static_cast<__mmask16>(0xffff)
                       : count <= 16 ? static_cast<__mmask16>(0)
                                     : static_cast<__mmask16>((1u << (count - 16)) - 1u);
  const __m512 x0 = _mm512_maskz_loadu_ps(m0, x), x1 = _mm512_maskz_loadu_ps(m1, x + 16);
  const __m512 a0 = _mm512_abs_ps(x0), a1 = _mm512_abs_ps(x1);
  const float largest = _mm512_reduce_max_ps(_mm512_max_ps(a0, a1));
  const __m512 infinity = _mm512_set1_ps(std::numeric_limits<float>::infinity());
  // NLT: true for infinities and NaN.
  const bool finite =
      (_mm512_cmp_ps_mask(a0, infinity, _CMP_NLT_UQ) | _mm512_cmp_ps_mask(a1, infinity, _CMP_NLT_UQ)) == 0;
  const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
  __m512i q0 = _mm512_setzero_si512(), q1 = _mm512_setzero_si512();
  if (finite && std::isfinite(inverse)) {
    const __m512 by = _mm512_set1_ps(inverse);
    q0 = _mm512_cvtps_epi32(_mm512_mul_ps(x0, by));
    q1 = _mm512_cvtps_epi32(_mm512_mul_ps(x1, by));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(q0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16), _mm512_cvtepi32_epi8(q1));
  return finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
}

// Of half a group; loads what quantize_group stored at once.
inline std::int32_t sum_of_half(const std::int8_t* values) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(v, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 128 * 16;
}
inline std::int32_t sum_of_group(const std::int8_t* values) { return sum_of_half(values) + sum_of_half(values + 16); }

inline void prepare_a8_q4(PI2_PREPARE_ARGS) {
  auto* to = static_cast<std::int8_t*>(out);
  auto* scales = reinterpret_cast<ScalesQ4*>(to + padded(n));
  for (std::int64_t begin = 0; begin < n; begin += kStep, to += kStep, ++scales) {
    for (std::int64_t g = 0; g < 4; ++g) {
      const std::int64_t left = n - begin - g * kGroup;
      std::int8_t values[kGroup] = {};
      scales->scale[g] = left > 0 ? quantize_group(x + begin + g * kGroup, std::min(left, kGroup), values) : 0.0f;
      scales->start[g] = -8 * sum_of_group(values);
      std::memcpy(to + 16 * g, values, 16);
      std::memcpy(to + 64 + 16 * g, values + 16, 16);
    }
  }
}

template <int kRows, int kTokens>
inline void dot_a8_q4_tile(const void* const* rows, const void* const* x_T, std::int64_t n, float* out,
                           std::int64_t ldo, const void* const* next, std::int64_t pace) {
  const std::int64_t n_groups = groups(n);
  NextRows<avx512::Simd, kRows> ahead{next, pace};
  const __m512i low_half = _mm512_set1_epi8(15);
  const char* w[kRows];
  const char* s[kRows];
  __m512 acc[kRows][kTokens];
  for (int r = 0; r < kRows; ++r) {
    w[r] = row_at(rows, r);
    s[r] = w[r] + n_groups * (kGroup / 2);
    for (int t = 0; t < kTokens; ++t) acc[r][t] = _mm512_setzero_ps();
  }
  const std::int8_t* x[kTokens];
  const ScalesQ4* x_scales[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    const StepInput<ScalesQ4> input(x_T[t], n);
    x[t] = input.values;
    x_scales[t] = input.scales;
  }
  for (std::int64_t g = 0; g < n_groups; g += 4) {
    ahead.step();
    __m512i low[kRows], high[kRows];
    __m512 scale[kRows];
    for (int r = 0; r < kRows; ++r) {
      const __m512i nibbles = avx512::nibbles_of_4(w[r] + g * (kGroup / 2), n_groups - g);
      low[r] = _mm512_and_si512(nibbles, low_half);
      high[r] = _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), low_half);
      scale[r] = avx512::scales_of_4(s[r] + 2 * g, n_groups - g);
    }
    for (int t = 0; t < kTokens; ++t) {
      const __m512i x_low = _mm512_load_si512(x[t] + g * kGroup), x_high = _mm512_load_si512(x[t] + g * kGroup + 64);
      __m512 x_scale;
      __m512i start;
      spread(x_scales[t][g / 4], &x_scale, &start);
      for (int r = 0; r < kRows; ++r) {
        const __m512i sum = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(start, low[r], x_low), high[r], x_high);
        acc[r][t] = _mm512_fmadd_ps(_mm512_mul_ps(scale[r], x_scale), _mm512_cvtepi32_ps(sum), acc[r][t]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t) out[r * ldo + t] = _mm512_reduce_add_ps(acc[r][t]);
}

inline void dot_a8_q4(PI2_DOT_ARGS) {
  const std::int64_t steps = (n + kStep - 1) / kStep;
  return over_rows<over_tokens<4, dot_a8_q4_tile<1, 4>, dot_a8_q4_tile<1, 1>, dot_a8_q4_tile<1, 2>>,
                   over_tokens<4, dot_a8_q4_tile<2, 4>, dot_a8_q4_tile<2, 1>, dot_a8_q4_tile<2, 2>>,
                   over_tokens<2, dot_a8_q4_tile<4, 2>, dot_a8_q4_tile<4, 1>>>(rows, count, x_T, tokens, n, out_RT,
                                                                               next, row_bytes(DType::kQ4, n), steps);
}

inline void prepare_a8_q8(PI2_PREPARE_ARGS) {
  auto* to = static_cast<std::int8_t*>(out);
  auto* scales = reinterpret_cast<ScalesQ8*>(to + padded(n));
  for (std::int64_t begin = 0; begin < n; begin += 64, to += 64, ++scales) {
    for (std::int64_t g = 0; g < 2; ++g) {
      const std::int64_t left = n - begin - g * kGroup;
      std::memset(to + g * kGroup, 0, kGroup);
      scales->scale[g] =
          left > 0 ? quantize_group(x + begin + g * kGroup, std::min(left, kGroup), to + g * kGroup) : 0.0f;
      scales->start[g] = -128 * sum_of_group(to + g * kGroup);
    }
  }
}

template <int kRows, int kTokens>
inline void dot_a8_q8_tile(const void* const* rows, const void* const* x_T, std::int64_t n, float* out,
                           std::int64_t ldo, const void* const* next, std::int64_t pace) {
  const std::int64_t n_groups = groups(n);
  NextRows<avx512::Simd, kRows> ahead{next, pace};
  const __m512i offset = _mm512_set1_epi8(-128);
  const __m512i two = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  const char* w[kRows];
  __m512 acc[kRows][kTokens];
  for (int r = 0; r < kRows; ++r) {
    w[r] = row_at(rows, r);
    for (int t = 0; t < kTokens; ++t) acc[r][t] = _mm512_setzero_ps();
  }
  const std::int8_t* x[kTokens];
  const ScalesQ8* x_scales[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    const StepInput<ScalesQ8> input(x_T[t], n);
    x[t] = input.values;
    x_scales[t] = input.scales;
  }
  for (std::int64_t g = 0; g < n_groups; g += 2) {
    ahead.step();
    const bool both = n_groups - g >= 2;
    const __mmask64 m = both ? ~std::uint64_t{0} : 0xffffffffu;
    __m512 x_scale[kTokens];
    __m512i start[kTokens];
    for (int t = 0; t < kTokens; ++t) spread(x_scales[t][g / 2], &x_scale[t], &start[t]);
    for (int r = 0; r < kRows; ++r) {
      const __m512i values = _mm512_xor_si512(_mm512_maskz_loadu_epi8(m, w[r] + g * kGroup), offset);
      std::int32_t halves = 0;
      if (both)  // a branch, so that the copy is one instruction
        std::memcpy(&halves, w[r] + n_groups * kGroup + 2 * g, 4);
      else
        std::memcpy(&halves, w[r] + n_groups * kGroup + 2 * g, 2);
      const __m512 scale = _mm512_permutexvar_ps(two, _mm512_castps128_ps512(_mm_cvtph_ps(_mm_cvtsi32_si128(halves))));
      for (int t = 0; t < kTokens; ++t) {
        const __m512i sum = _mm512_dpbusd_epi32(start[t], values, _mm512_load_si512(x[t] + g * kGroup));
        acc[r][t] = _mm512_fmadd_ps(_mm512_mul_ps(scale, x_scale[t]), _mm512_cvtepi32_ps(sum), acc[r][t]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t) out[r * ldo + t] = _mm512_reduce_add_ps(acc[r][t]);
}

inline void dot_a8_q8(PI2_DOT_ARGS) {
  const std::int64_t steps = (n + 63) / 64;
  return over_rows<over_tokens<4, dot_a8_q8_tile<1, 4>, dot_a8_q8_tile<1, 1>, dot_a8_q8_tile<1, 2>>,
                   over_tokens<4, dot_a8_q8_tile<2, 4>, dot_a8_q8_tile<2, 1>, dot_a8_q8_tile<2, 2>>,
                   over_tokens<2, dot_a8_q8_tile<4, 2>, dot_a8_q8_tile<4, 1>>>(rows, count, x_T, tokens, n, out_RT,
                                                                               next, row_bytes(DType::kQ8, n), steps);
}

}  // namespace
}  // namespace pi2::avx512vnni
