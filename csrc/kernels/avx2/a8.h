// AVX2 kernels with int8 activations: a float scale per group of 32, integer sums exact.
//
// VPMADDUBSW multiplies unsigned by signed bytes and adds pairs in 16 bits, saturating; neither use here can saturate:
//   int4  values go in as stored (0..15), so a pair is at most 2 * 15 * 127 and two pairs fit; sums start at minus 8
//         times the x they will meet
//   int8  |w| times x with the sign of w: a pair is at most 2 * 128 * 127 = 32512
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/avx2/impl.h"

namespace pi2::avx2 {

struct alignas(32) StepQ4 {       // 64 weights
  std::int8_t low[32], high[32];  // x of the low and of the high nibbles
  std::int32_t start[8];
  float scale[8];  // by lane
};

struct alignas(32) StepQ8 {  // 32 weights
  std::int8_t values[32];
  float scale;
};

inline __m256i load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// One group as int8 (room for 32); returns its scale. The policy is that of scalar::prepare_a8.
inline float quantize_group(const float* x, std::int64_t count, std::int8_t* out) {
  float group[kGroup] = {};
  std::memcpy(group, x, static_cast<std::size_t>(count) * sizeof(float));
  __m256 v[4];
  __m256 most = _mm256_setzero_ps(), broken = _mm256_setzero_ps();
  const __m256 infinity = _mm256_set1_ps(std::numeric_limits<float>::infinity());
  for (int j = 0; j < 4; ++j) {
    v[j] = _mm256_loadu_ps(group + 8 * j);
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v[j]);
    most = _mm256_max_ps(most, magnitude);
    broken = _mm256_or_ps(broken, _mm256_cmp_ps(magnitude, infinity, _CMP_NLT_UQ));  // infinities and NaN
  }
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  const float largest = _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  const bool finite = _mm256_movemask_ps(broken) == 0;
  const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
  __m256i bytes = _mm256_setzero_si256();
  if (finite && std::isfinite(inverse)) {
    __m256i q[4];
    for (int j = 0; j < 4; ++j) q[j] = _mm256_cvtps_epi32(_mm256_mul_ps(v[j], _mm256_set1_ps(inverse)));
    bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0));  // packs work by halves
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
  return finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
}

// Sums of neighbouring 16-bit numbers, by lane of 32 bits.
inline __m256i pairs(__m256i v) { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); }

inline void prepare_a8_q4(PI2_PREPARE_ARGS) {
  auto* step = static_cast<StepQ4*>(out);
  for (std::int64_t begin = 0; begin < n; begin += 2 * kGroup, ++step) {
    for (std::int64_t g = 0; g < 2; ++g) {
      const std::int64_t left = n - begin - g * kGroup;
      std::int8_t values[kGroup] = {};
      const float scale = left > 0 ? quantize_group(x + begin + g * kGroup, std::min(left, kGroup), values) : 0.0f;
      std::memcpy(step->low + 16 * g, values, 16);
      std::memcpy(step->high + 16 * g, values + 16, 16);
      for (std::int64_t l = 0; l < 4; ++l) step->scale[4 * g + l] = scale;
    }
    const __m256i ones = _mm256_set1_epi8(1);
    const __m256i sums = pairs(_mm256_add_epi16(_mm256_maddubs_epi16(ones, load_bytes(step->low)),
                                                _mm256_maddubs_epi16(ones, load_bytes(step->high))));
    _mm256_store_si256(reinterpret_cast<__m256i*>(step->start), _mm256_mullo_epi32(sums, _mm256_set1_epi32(-8)));
  }
}

template <int kRows, int kTokens>
inline void dot_a8_q4_tile(const void* const* rows, const void* const* x_T, std::int64_t n, float* out,
                           std::int64_t ldo, const void* const* next, std::int64_t pace) {
  const std::int64_t n_groups = groups(n);
  NextRows<Simd, kRows> ahead{next, pace};
  const __m256i low_half = _mm256_set1_epi8(15);
  const char* w[kRows];
  __m256 acc[kRows][kTokens];
  for (int r = 0; r < kRows; ++r) {
    w[r] = row_at(rows, r);
    for (int t = 0; t < kTokens; ++t) acc[r][t] = Simd::zero();
  }
  for (std::int64_t g = 0; g < n_groups; g += 2) {
    ahead.step();
    for (int r = 0; r < kRows; ++r) {
      const __m256i bytes = Simd::q4_bytes(w[r] + g * (kGroup / 2), n_groups - g);
      const __m256i low = _mm256_and_si256(bytes, low_half);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low_half);
      const __m256 scale = Simd::q4_scales(w[r] + n_groups * (kGroup / 2) + 2 * g, n_groups - g);
      for (int t = 0; t < kTokens; ++t) {
        const StepQ4& x = static_cast<const StepQ4*>(x_T[t])[g / 2];
        const __m256i sum = pairs(_mm256_add_epi16(_mm256_maddubs_epi16(low, load_bytes(x.low)),
                                                   _mm256_maddubs_epi16(high, load_bytes(x.high))));
        acc[r][t] = Simd::fma(Simd::mul(scale, Simd::load_floats(x.scale)),
                              _mm256_cvtepi32_ps(_mm256_add_epi32(sum, load_bytes(x.start))), acc[r][t]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t) out[r * ldo + t] = Simd::reduce(acc[r][t]);
}

inline void dot_a8_q4(PI2_DOT_ARGS) {
  const std::int64_t steps = (groups(n) + 1) / 2;
  return over_rows<over_tokens<4, dot_a8_q4_tile<1, 4>, dot_a8_q4_tile<1, 1>>,
                   over_tokens<2, dot_a8_q4_tile<2, 2>, dot_a8_q4_tile<2, 1>>>(rows, count, x_T, tokens, n, out_RT,
                                                                               next, row_bytes(DType::kQ4, n), steps);
}

inline void prepare_a8_q8(PI2_PREPARE_ARGS) {
  auto* step = static_cast<StepQ8*>(out);
  for (std::int64_t begin = 0; begin < n; begin += kGroup, ++step)
    step->scale = quantize_group(x + begin, std::min(n - begin, kGroup), step->values);
}

template <int kRows, int kTokens>
inline void dot_a8_q8_tile(const void* const* rows, const void* const* x_T, std::int64_t n, float* out,
                           std::int64_t ldo, const void* const* next, std::int64_t pace) {
  const std::int64_t n_groups = groups(n);
  NextRows<Simd, kRows> ahead{next, pace};
  const char* w[kRows];
  __m256 acc[kRows][kTokens];
  for (int r = 0; r < kRows; ++r) {
    w[r] = row_at(rows, r);
    for (int t = 0; t < kTokens; ++t) acc[r][t] = Simd::zero();
  }
  for (std::int64_t g = 0; g < n_groups; ++g) {
    ahead.step();
    for (int r = 0; r < kRows; ++r) {
      const __m256i values = load_bytes(w[r] + g * kGroup);
      const __m256i magnitude = _mm256_abs_epi8(values);  // -128 becomes 128: unsigned from here on
      const float scale = Simd::half(w[r] + n_groups * kGroup + 2 * g);
      for (int t = 0; t < kTokens; ++t) {
        const StepQ8& x = static_cast<const StepQ8*>(x_T[t])[g];
        const __m256i sum = pairs(_mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(load_bytes(x.values), values)));
        acc[r][t] = Simd::fma(Simd::set1(scale * x.scale), _mm256_cvtepi32_ps(sum), acc[r][t]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t) out[r * ldo + t] = Simd::reduce(acc[r][t]);
}

inline void dot_a8_q8(PI2_DOT_ARGS) {
  return over_rows<over_tokens<4, dot_a8_q8_tile<1, 4>, dot_a8_q8_tile<1, 1>>,
                   over_tokens<2, dot_a8_q8_tile<2, 2>, dot_a8_q8_tile<2, 1>>>(
      rows, count, x_T, tokens, n, out_RT, next, row_bytes(DType::kQ8, n), groups(n));
}

}  // namespace pi2::avx2
