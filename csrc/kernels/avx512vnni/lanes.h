// Products of 16 int4 rows with the bits of dot_blocks, for few tokens: the integer sums of rows are transposed, so
// that lanes are rows, instead of the rows themselves.
#pragma once

#include "kernels/avx512vnni/gemm.h"

// Unnamed: functions that are compiled with other flags elsewhere must stay apart (the linker would keep one of them).
namespace pi2::avx512vnni {
namespace {

// Of 16 lanes of partial sums a row, four for each of four groups: the sums of 4 rows, group by group.
inline __m512i sums_of_4_rows(const __m512i* a) {
  const __m512i low = _mm512_add_epi32(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
  const __m512i high = _mm512_add_epi32(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
}

// From 4 x (group, 4 rows) to group by group, 16 rows each.
inline void rows_of_groups(const __m512i* s, __m512i* out) {
  const __m512i a = _mm512_shuffle_i32x4(s[0], s[1], 0x44), b = _mm512_shuffle_i32x4(s[2], s[3], 0x44);
  const __m512i c = _mm512_shuffle_i32x4(s[0], s[1], 0xee), d = _mm512_shuffle_i32x4(s[2], s[3], 0xee);
  out[0] = _mm512_shuffle_i32x4(a, b, 0x88);
  out[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
  out[2] = _mm512_shuffle_i32x4(c, d, 0x88);
  out[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
}

// `count` (2 or 4) scales at `at` of 16 rows, as floats, group by group.
inline void scales_of_rows(const char* const* rows, std::int64_t at, std::int64_t count, __m512* out) {
  __m128i low[4], high[4];  // groups 0 and 1, 2 and 3 of four rows
  for (int q = 0; q < 4; ++q) {
    __m128i four[4];
    for (int r = 0; r < 4; ++r) {
      std::int64_t halves = 0;
      if (count == 4)
        std::memcpy(&halves, rows[4 * q + r] + at, 8);
      else
        std::memcpy(&halves, rows[4 * q + r] + at, 4);
      four[r] = _mm_cvtsi64_si128(halves);
    }
    const __m128i a = _mm_unpacklo_epi16(four[0], four[1]), b = _mm_unpacklo_epi16(four[2], four[3]);
    low[q] = _mm_unpacklo_epi32(a, b);
    high[q] = _mm_unpackhi_epi32(a, b);
  }
  const auto all = [](__m128i first, __m128i second) {
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1));
  };
  out[0] = all(_mm_unpacklo_epi64(low[0], low[1]), _mm_unpacklo_epi64(low[2], low[3]));
  out[1] = all(_mm_unpackhi_epi64(low[0], low[1]), _mm_unpackhi_epi64(low[2], low[3]));
  out[2] = all(_mm_unpacklo_epi64(high[0], high[1]), _mm_unpacklo_epi64(high[2], high[3]));
  out[3] = all(_mm_unpackhi_epi64(high[0], high[1]), _mm_unpackhi_epi64(high[2], high[3]));
}

template <int kTokens>
inline void dot_lanes_q4_of(const void* const* rows, const void* const* next, const void* const* x_T, std::int64_t n,
                            float* out, std::int64_t ldo) {
  const std::int64_t n_groups = groups(n), scales = n_groups * (kGroup / 2);
  const __m512i low_half = _mm512_set1_epi8(15);
  const char* w[kPanelRows];
  for (std::int64_t r = 0; r < kPanelRows; ++r) w[r] = static_cast<const char*>(rows[r]);
  const std::int8_t* x[kTokens];
  const float* x_scale[kTokens];
  const std::int32_t* start[kTokens];
  __m512 sum[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    const GemmInput input(x_T[t], n);
    x[t] = input.values;
    x_scale[t] = input.scale;
    start[t] = input.start;
    sum[t] = _mm512_setzero_ps();
  }
  for (std::int64_t g = 0; g < n_groups; g += 4) {
    const std::int64_t left = n_groups - g;
    __m512i x_low[kTokens], x_high[kTokens], sums[kTokens][4];
    for (int t = 0; t < kTokens; ++t) {  // the first and the second halves of four groups
      const __m512i a = _mm512_loadu_si512(x[t] + g * kGroup), b = _mm512_loadu_si512(x[t] + (g + 2) * kGroup);
      x_low[t] = _mm512_shuffle_i32x4(a, b, 0x88);
      x_high[t] = _mm512_shuffle_i32x4(a, b, 0xdd);
    }
    for (int q = 0; q < 4; ++q) {
      __m512i part[kTokens][4];
      for (int r = 0; r < 4; ++r) {
        if (next != nullptr) fetch(static_cast<const char*>(next[4 * q + r]) + g * (kGroup / 2));
        const __m512i nibbles = avx512::nibbles_of_4(w[4 * q + r] + g * (kGroup / 2), left);
        const __m512i low = _mm512_and_si512(nibbles, low_half);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), low_half);
        for (int t = 0; t < kTokens; ++t)
          part[t][r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), low, x_low[t]), high, x_high[t]);
      }
      for (int t = 0; t < kTokens; ++t) sums[t][q] = sums_of_4_rows(part[t]);
    }
    __m512 scale[4];
    scales_of_rows(w, scales + 2 * g, std::min<std::int64_t>(4, left), scale);
    for (int t = 0; t < kTokens; ++t) {
      __m512i of_group[4];
      rows_of_groups(sums[t], of_group);
      for (std::int64_t i = 0; i < 4; ++i) {
        if (i == left) break;
        const __m512i whole = _mm512_add_epi32(of_group[i], _mm512_set1_epi32(start[t][g + i]));
        sum[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), _mm512_mul_ps(scale[i], _mm512_set1_ps(x_scale[t][g + i])),
                                 sum[t]);
      }
    }
  }
  for (std::int64_t r = 0; next != nullptr && r < kPanelRows; ++r)
    for (std::int64_t at = scales; at < scales + 2 * n_groups; at += 64) fetch(static_cast<const char*>(next[r]) + at);
  for (int t = 0; t < kTokens; ++t) _mm512_storeu_ps(out + t * ldo, sum[t]);
}

}  // namespace
}  // namespace pi2::avx512vnni
