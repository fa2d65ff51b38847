// AVX-512 as kernels/plain.h wants it. Compiled with AVX512F/BW/VL/DQ; bf16 is widened by a shift and fp16 by
// F16C-style converts, so every product is exact in float and no denormal is flushed (unlike VDPBF16PS).
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels/plain.h"

namespace pi2::avx512 {

struct Simd {
  using Float = __m512;
  static constexpr std::int64_t kLanes = 16;

  static __mmask16 first(std::int64_t left) { return static_cast<__mmask16>((1u << left) - 1u); }
  static Float zero() { return _mm512_setzero_ps(); }
  static Float set1(float v) { return _mm512_set1_ps(v); }
  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static float reduce(Float v) { return _mm512_reduce_add_ps(v); }
  static float half(const char* p) {
    std::uint16_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    return _cvtsh_ss(bits);
  }
  static float reduce_max(Float v) { return _mm512_reduce_max_ps(v); }
  static void reduce4(Float a, Float b, Float c, Float d, float* out) {
    const Float ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const Float cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const Float all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
  static Float shift_exponent(Float p, Float t) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), n));
  }
  static Float zero_below(Float x, Float least, Float v) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), v);
  }
  static Float load_floats(const float* p) { return _mm512_loadu_ps(p); }
  static Float load_floats(const float* p, std::int64_t left) { return _mm512_maskz_loadu_ps(first(left), p); }
  static void store_floats(float* p, Float v) { _mm512_storeu_ps(p, v); }
  static void store_floats(float* p, Float v, std::int64_t left) { _mm512_mask_storeu_ps(p, first(left), v); }
};

struct F32 : Simd {
  static constexpr std::int64_t kBytes = 4;
  static __m512 load(const char* p) { return _mm512_loadu_ps(p); }
  static __m512 load(const char* p, std::int64_t left) { return _mm512_maskz_loadu_ps(first(left), p); }
};

struct BF16 : Simd {
  static constexpr std::int64_t kBytes = 2;
  static __m512 widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
  static __m512 load(const char* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static __m512 load(const char* p, std::int64_t left) { return widen(_mm256_maskz_loadu_epi16(first(left), p)); }
};

struct F16 : Simd {
  static constexpr std::int64_t kBytes = 2;
  static __m512 load(const char* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static __m512 load(const char* p, std::int64_t left) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(left), p));
  }
};

struct I8 : Simd {
  static constexpr std::int64_t kBytes = 1;
  static __m512 widen(__m128i v) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v)); }
  static __m512 load(const char* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static __m512 load(const char* p, std::int64_t left) { return widen(_mm_maskz_loadu_epi8(first(left), p)); }
};

template <class Format>
inline void dot(PI2_DOT_ARGS) {
  dot_plain<Format, 4, 2>(rows, count, x_T, tokens, n, out_RT, next);
}

template <class Format>
inline void axpy(PI2_AXPY_ARGS) {
  axpy_plain<Format>(y, rows, h, count, n, next);
}

}  // namespace pi2::avx512
