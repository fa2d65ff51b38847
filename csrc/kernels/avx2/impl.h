// AVX2 kernels (with FMA and F16C, which every AVX2 CPU has). Tails are done through a zero-padded copy, so that
// the arithmetic of the last elements is the same as that of the others.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "pi2/kernels.h"

namespace pi2::avx2 {

constexpr std::int64_t kLanes = 8;

struct F32 {
  static constexpr std::int64_t kBytes = 4;
  static __m256 load(const char* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
};

struct BF16 {
  static constexpr std::int64_t kBytes = 2;
  static __m256 load(const char* p) {
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
  }
};

struct F16 {
  static constexpr std::int64_t kBytes = 2;
  static __m256 load(const char* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
};

struct I8 {
  static constexpr std::int64_t kBytes = 1;
  static __m256 load(const char* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
};

template <class Format>
inline __m256 load_tail(const char* p, std::int64_t left) {
  char padded[kLanes * 4] = {};
  std::memcpy(padded, p, static_cast<std::size_t>(left * Format::kBytes));
  return Format::load(padded);
}

inline float reduce(const __m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// As in avx512/impl.h: the order of a sum depends on n alone, and the hint is spread over the loop. Sixteen registers
// hold one row and two tokens, or two rows and one token.
template <class Format, int kRows, int kTokens>
inline void dot_tile(const void* const* rows, const float* const* x_T, std::int64_t n, float* out, std::int64_t ldo,
                     const char* next, std::int64_t lines) {
  const char* w[kRows];
  __m256 acc[kRows][kTokens][4];
  for (int r = 0; r < kRows; ++r) {
    w[r] = static_cast<const char*>(rows[r]);
    for (int t = 0; t < kTokens; ++t)
      for (int j = 0; j < 4; ++j) acc[r][t][j] = _mm256_setzero_ps();
  }
  std::int64_t k = 0;
  for (; k + 4 * kLanes <= n; k += 4 * kLanes) {
    for (std::int64_t line = 0; line < lines; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T0);
    for (int j = 0; j < 4; ++j) {
      __m256 v[kRows];
      for (int r = 0; r < kRows; ++r) v[r] = Format::load(w[r] + (k + j * kLanes) * Format::kBytes);
      for (int t = 0; t < kTokens; ++t) {
        const __m256 xv = _mm256_loadu_ps(x_T[t] + k + j * kLanes);
        for (int r = 0; r < kRows; ++r) acc[r][t][j] = _mm256_fmadd_ps(v[r], xv, acc[r][t][j]);
      }
    }
  }
  for (int j = 0; k < n; k += kLanes, ++j) {
    const std::int64_t left = n - k < kLanes ? n - k : kLanes;
    for (int r = 0; r < kRows; ++r) {
      const __m256 v = load_tail<Format>(w[r] + k * Format::kBytes, left);
      for (int t = 0; t < kTokens; ++t) {
        const __m256 xv = load_tail<F32>(reinterpret_cast<const char*>(x_T[t] + k), left);
        acc[r][t][j] = _mm256_fmadd_ps(v, xv, acc[r][t][j]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t)
      out[r * ldo + t] =
          reduce(_mm256_add_ps(_mm256_add_ps(acc[r][t][0], acc[r][t][1]), _mm256_add_ps(acc[r][t][2], acc[r][t][3])));
}

template <class Format, int kRows, int kTile>
inline void dot_rows(PI2_DOT_ARGS) {
  (void)count;
  const char* hint = static_cast<const char*>(next);
  const std::int64_t steps = n / (4 * kLanes);
  std::int64_t lines = steps > 0 ? (next_bytes + 64 * steps - 1) / (64 * steps) : 0;
  std::int64_t t = 0;
  for (; t + kTile <= tokens; t += kTile, lines = 0)
    dot_tile<Format, kRows, kTile>(rows, x_T + t, n, out_RT + t, tokens, hint, lines);
  for (; t < tokens; ++t, lines = 0) dot_tile<Format, kRows, 1>(rows, x_T + t, n, out_RT + t, tokens, hint, lines);
}

template <class Format>
inline void dot(PI2_DOT_ARGS) {
  if (count == 1) return dot_rows<Format, 1, 2>(rows, count, x_T, tokens, n, out_RT, next, next_bytes);
  return dot_rows<Format, 2, 1>(rows, count, x_T, tokens, n, out_RT, next, next_bytes);
}

template <class Format>
inline void axpy(PI2_AXPY_ARGS) {
  __m256 scale[kAxpyRows];
  const char* w[kAxpyRows];
  for (std::int64_t r = 0; r < count; ++r) {
    scale[r] = _mm256_set1_ps(h[r]);
    w[r] = static_cast<const char*>(rows[r]);
  }
  std::int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    __m256 sum = _mm256_loadu_ps(y + k);
    for (std::int64_t r = 0; r < count; ++r)
      sum = _mm256_fmadd_ps(scale[r], Format::load(w[r] + k * Format::kBytes), sum);
    _mm256_storeu_ps(y + k, sum);
  }
  if (k < n) {
    __m256 sum = load_tail<F32>(reinterpret_cast<const char*>(y + k), n - k);
    for (std::int64_t r = 0; r < count; ++r)
      sum = _mm256_fmadd_ps(scale[r], load_tail<Format>(w[r] + k * Format::kBytes, n - k), sum);
    float padded[kLanes];
    _mm256_storeu_ps(padded, sum);
    std::memcpy(y + k, padded, static_cast<std::size_t>(n - k) * sizeof(float));
  }
}

}  // namespace pi2::avx2
