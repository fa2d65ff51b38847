// AVX-512 kernels. Compiled with AVX512F/BW/VL/DQ; bf16 is widened by a shift and fp16 by F16C-style converts, so
// every product is exact in float and no denormal is flushed (unlike VDPBF16PS).
#pragma once

#include <immintrin.h>

#include "pi2/kernels.h"

namespace pi2::avx512 {

constexpr std::int64_t kLanes = 16;

struct F32 {
  static constexpr std::int64_t kBytes = 4;
  static __m512 load(const char* p) { return _mm512_loadu_ps(p); }
  static __m512 load(const char* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
};

struct BF16 {
  static constexpr std::int64_t kBytes = 2;
  static __m512 widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
  static __m512 load(const char* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static __m512 load(const char* p, __mmask16 m) { return widen(_mm256_maskz_loadu_epi16(m, p)); }
};

struct F16 {
  static constexpr std::int64_t kBytes = 2;
  static __m512 load(const char* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static __m512 load(const char* p, __mmask16 m) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, p)); }
};

struct I8 {
  static constexpr std::int64_t kBytes = 1;
  static __m512 widen(__m128i v) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v)); }
  static __m512 load(const char* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static __m512 load(const char* p, __mmask16 m) { return widen(_mm_maskz_loadu_epi8(m, p)); }
};

inline __mmask16 tail_mask(std::int64_t left) { return static_cast<__mmask16>((1u << left) - 1u); }

// Four accumulators per row and token whatever the tile, so that the order of a sum depends on n alone.
// The hint is spread over the loop: `lines` cache lines of it per step of 64 elements, into L2, where a whole bundle
// can wait without pushing x out of L1.
template <class Format, int kRows, int kTokens>
inline void dot_tile(const void* const* rows, const float* const* x_T, std::int64_t n, float* out, std::int64_t ldo,
                     const char* next, std::int64_t lines) {
  const char* w[kRows];
  __m512 acc[kRows][kTokens][4];
  for (int r = 0; r < kRows; ++r) {
    w[r] = static_cast<const char*>(rows[r]);
    for (int t = 0; t < kTokens; ++t)
      for (int j = 0; j < 4; ++j) acc[r][t][j] = _mm512_setzero_ps();
  }
  std::int64_t k = 0;
  for (; k + 4 * kLanes <= n; k += 4 * kLanes) {
    for (std::int64_t line = 0; line < lines; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T0);
    for (int j = 0; j < 4; ++j) {
      __m512 v[kRows];
      for (int r = 0; r < kRows; ++r) v[r] = Format::load(w[r] + (k + j * kLanes) * Format::kBytes);
      for (int t = 0; t < kTokens; ++t) {
        const __m512 xv = _mm512_loadu_ps(x_T[t] + k + j * kLanes);
        for (int r = 0; r < kRows; ++r) acc[r][t][j] = _mm512_fmadd_ps(v[r], xv, acc[r][t][j]);
      }
    }
  }
  for (int j = 0; k < n; k += kLanes, ++j) {
    const __mmask16 m = n - k >= kLanes ? static_cast<__mmask16>(0xffff) : tail_mask(n - k);
    for (int r = 0; r < kRows; ++r) {
      const __m512 v = Format::load(w[r] + k * Format::kBytes, m);
      for (int t = 0; t < kTokens; ++t)
        acc[r][t][j] = _mm512_fmadd_ps(v, _mm512_maskz_loadu_ps(m, x_T[t] + k), acc[r][t][j]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t)
      out[r * ldo + t] = _mm512_reduce_add_ps(
          _mm512_add_ps(_mm512_add_ps(acc[r][t][0], acc[r][t][1]), _mm512_add_ps(acc[r][t][2], acc[r][t][3])));
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
  if (count == 1) return dot_rows<Format, 1, 4>(rows, count, x_T, tokens, n, out_RT, next, next_bytes);
  return dot_rows<Format, 2, 2>(rows, count, x_T, tokens, n, out_RT, next, next_bytes);
}

template <class Format, int kRows>
inline void axpy_rows(float* y, const void* const* rows, const float* h, std::int64_t n) {
  __m512 scale[kRows];
  const char* w[kRows];
  for (int r = 0; r < kRows; ++r) {
    scale[r] = _mm512_set1_ps(h[r]);
    w[r] = static_cast<const char*>(rows[r]);
  }
  std::int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    __m512 sum = _mm512_loadu_ps(y + k);
    for (int r = 0; r < kRows; ++r) sum = _mm512_fmadd_ps(scale[r], Format::load(w[r] + k * Format::kBytes), sum);
    _mm512_storeu_ps(y + k, sum);
  }
  if (k < n) {
    const __mmask16 m = tail_mask(n - k);
    __m512 sum = _mm512_maskz_loadu_ps(m, y + k);
    for (int r = 0; r < kRows; ++r) sum = _mm512_fmadd_ps(scale[r], Format::load(w[r] + k * Format::kBytes, m), sum);
    _mm512_mask_storeu_ps(y + k, m, sum);
  }
}

template <class Format>
inline void axpy(PI2_AXPY_ARGS) {
  switch (count) {
    case 1: return axpy_rows<Format, 1>(y, rows, h, n);
    case 2: return axpy_rows<Format, 2>(y, rows, h, n);
    case 3: return axpy_rows<Format, 3>(y, rows, h, n);
    default: return axpy_rows<Format, 4>(y, rows, h, n);
  }
}

}  // namespace pi2::avx512
