// AVX2 (with FMA and F16C, which every AVX2 CPU has) as kernels/plain.h, q4.h and q8.h want it. Tails are done through
// a zero-padded copy, so that the arithmetic of the last elements is the same as that of the others. Sixteen registers
// hold one row and two tokens of a plain dtype, or two rows and one token.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels/plain.h"

namespace pi2::avx2 {

struct Simd {
  using Float = __m256;
  using Int = __m256i;
  static constexpr std::int64_t kLanes = 8;

  static Float zero() { return _mm256_setzero_ps(); }
  static Float set1(float v) { return _mm256_set1_ps(v); }
  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static float reduce(Float v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  static float reduce_max(Float v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
  static void reduce4(Float a, Float b, Float c, Float d, float* out) {
    const Float all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
  }
  static Float shift_exponent(Float p, Float t) {
    const Int n = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), n));
  }
  static Float zero_below(Float x, Float least, Float v) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, least, _CMP_LT_OQ), v);
  }

  static Float load_floats(const float* p) { return _mm256_loadu_ps(p); }
  static Float load_floats(const float* p, std::int64_t left) {
    float padded[kLanes] = {};
    std::memcpy(padded, p, static_cast<std::size_t>(left) * sizeof(float));
    return _mm256_loadu_ps(padded);
  }
  static void store_floats(float* p, Float v) { _mm256_storeu_ps(p, v); }
  static void store_floats(float* p, Float v, std::int64_t left) {
    float padded[kLanes];
    _mm256_storeu_ps(padded, v);
    std::memcpy(p, padded, static_cast<std::size_t>(left) * sizeof(float));
  }

  // Two groups' values, or one's and zeros.
  static Int q4_bytes(const char* p, std::int64_t groups_left) {
    if (groups_left >= 2) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // The offset of 8 is the sign bit turned over.
  static Int q4_values(const char* p, std::int64_t groups_left) {
    return _mm256_xor_si256(q4_bytes(p, groups_left), _mm256_set1_epi8(static_cast<char>(0x88)));
  }
  template <int kJ>
  static Float q4_weights(Int values) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(kJ == 7 ? values : _mm256_slli_epi32(values, 28 - 4 * kJ), 28));
  }
  static Float q4_scales(const char* p, std::int64_t groups_left) {
    std::int32_t halves = 0;
    if (groups_left >= 2)  // a branch, so that the copy is one instruction
      std::memcpy(&halves, p, 4);
    else
      std::memcpy(&halves, p, 2);
    const __m256i spread = _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0);
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_cvtph_ps(_mm_cvtsi32_si128(halves))), spread);
  }

  static void q8_weights(const char* p, Float (&w)[4]) {
    for (int j = 0; j < 4; ++j)
      w[j] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * j))));
  }
  static float half(const char* p) {
    std::uint16_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    return _cvtsh_ss(bits);
  }
};

template <class Format>
inline __m256 load_tail(const char* p, std::int64_t left) {
  char padded[Simd::kLanes * Format::kBytes] = {};
  std::memcpy(padded, p, static_cast<std::size_t>(left * Format::kBytes));
  return Format::load(padded);
}

struct F32 : Simd {
  static constexpr std::int64_t kBytes = 4;
  static __m256 load(const char* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
  static __m256 load(const char* p, std::int64_t left) { return load_tail<F32>(p, left); }
};

struct BF16 : Simd {
  static constexpr std::int64_t kBytes = 2;
  static __m256 load(const char* p) {
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
  }
  static __m256 load(const char* p, std::int64_t left) { return load_tail<BF16>(p, left); }
};

struct F16 : Simd {
  static constexpr std::int64_t kBytes = 2;
  static __m256 load(const char* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static __m256 load(const char* p, std::int64_t left) { return load_tail<F16>(p, left); }
};

struct I8 : Simd {
  static constexpr std::int64_t kBytes = 1;
  static __m256 load(const char* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static __m256 load(const char* p, std::int64_t left) { return load_tail<I8>(p, left); }
};

template <class Format>
inline void dot(PI2_DOT_ARGS) {
  dot_plain<Format, 2, 1>(rows, count, x_T, tokens, n, out_RT, next);
}

template <class Format>
inline void axpy(PI2_AXPY_ARGS) {
  axpy_plain<Format>(y, rows, h, count, n, next);
}

}  // namespace pi2::avx2
