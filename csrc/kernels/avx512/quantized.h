// AVX-512 as kernels/q4.h and q8.h want it. A shift and a table look-up (vpermps reads the low four bits of each lane)
// give 16 weights of an int4 step.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels/avx512/impl.h"
#include "kernels/q4.h"
#include "kernels/q8.h"

// Unnamed: functions that are compiled with other flags elsewhere must stay apart (the linker would keep one of them).
namespace pi2::avx512 {
namespace {

constexpr std::int64_t kStep = 128;  // weights per step

// Four groups' scales, each over the four lanes of its group; 0 for groups past the row's end.
inline __m512 scales_of_4(const char* scales, std::int64_t groups_left) {
  const __m512i spread = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  std::int64_t halves = 0;
  if (groups_left >= 4)  // a branch, so that the copy is one instruction
    std::memcpy(&halves, scales, 8);
  else
    std::memcpy(&halves, scales, static_cast<std::size_t>(2 * groups_left));
  return _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(_mm_cvtph_ps(_mm_cvtsi64_si128(halves))));
}

// 64 bytes of values, or those of the groups that are left and zeros.
inline __m512i nibbles_of_4(const char* values, std::int64_t groups_left) {
  if (groups_left >= 4) return _mm512_loadu_si512(values);
  return _mm512_maskz_loadu_epi8((std::uint64_t{1} << (16 * groups_left)) - 1, values);
}

struct Quantized : Simd {
  using Int = __m512i;

  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }

  static Int q4_values(const char* p, std::int64_t groups_left) { return nibbles_of_4(p, groups_left); }
  template <int kJ>
  static Float q4_weights(Int nibbles) {
    const __m512 table = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    return _mm512_permutexvar_ps(kJ == 0 ? nibbles : _mm512_srli_epi32(nibbles, 4 * kJ), table);
  }
  static Float q4_scales(const char* p, std::int64_t groups_left) { return scales_of_4(p, groups_left); }

  static void q8_weights(const char* p, Float (&w)[2]) {
    for (int j = 0; j < 2; ++j)
      w[j] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * j))));
  }
};

// A group of an int4 row in order, as kernels/attention.h wants it.
struct Group {
  static void unpack(const char* values, float scale, float* out) {
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
    const __m512 by = _mm512_set1_ps(scale);
    _mm512_storeu_ps(out, _mm512_mul_ps(Quantized::q4_weights<0>(both), by));
    _mm512_storeu_ps(out + kGroup / 2, _mm512_mul_ps(Quantized::q4_weights<1>(both), by));
  }
};

using Q4Rows = Q4<Quantized>;
using Q8Rows = Q8<Quantized>;
static_assert(Q4Rows::kStep == kStep);

inline void dot_q4(PI2_DOT_ARGS) { Q4Rows::dot(rows, count, x_T, tokens, n, out_RT, next); }
inline void axpy_q4(PI2_AXPY_ARGS) { Q4Rows::axpy(y, rows, h, count, n, next); }
inline void dot_q8(PI2_DOT_ARGS) { Q8Rows::dot(rows, count, x_T, tokens, n, out_RT, next); }
inline void axpy_q8(PI2_AXPY_ARGS) { Q8Rows::axpy(y, rows, h, count, n, next); }
inline void prepare_q8(PI2_PREPARE_ARGS) { Q8Rows::prepare(x, n, out); }
inline void restore_q8(PI2_RESTORE_ARGS) { Q8Rows::restore(y, n, out); }

// prepare and restore of int4 by gathers, several times as fast as number by number.

// Places in x of slots 16 j..16 j + 15 of a step; and, for restore, the slots of 16 places.
struct Q4Order {
  alignas(64) std::int32_t place[kStep], slot[kStep];

  constexpr Q4Order() : place(), slot() {
    for (std::int64_t s = 0; s < kStep; ++s) {
      place[s] = static_cast<std::int32_t>(Q4Rows::place(s));
      slot[Q4Rows::place(s)] = static_cast<std::int32_t>(s);
    }
  }
};
constexpr Q4Order kQ4Order;

// to[0, 128) = from[order].
inline void permute_step(const float* from, const std::int32_t* order, float* to) {
  for (std::int64_t j = 0; j < kStep; j += 16)
    _mm512_storeu_ps(to + j, _mm512_i32gather_ps(_mm512_load_si512(order + j), from, 4));
}

inline void prepare_q4(PI2_PREPARE_ARGS) {
  auto* to = static_cast<float*>(out);
  std::int64_t begin = 0;
  for (; begin + kStep <= n; begin += kStep, to += kStep) permute_step(x + begin, kQ4Order.place, to);
  if (begin == n) return;
  float last[kStep] = {};
  std::memcpy(last, x + begin, static_cast<std::size_t>(n - begin) * sizeof(float));
  permute_step(last, kQ4Order.place, to);
}

inline void restore_q4(PI2_RESTORE_ARGS) {
  std::int64_t begin = 0;
  for (; begin + kStep <= n; begin += kStep) permute_step(y + begin, kQ4Order.slot, out + begin);
  if (begin == n) return;
  float last[kStep];
  permute_step(y + begin, kQ4Order.slot, last);
  std::memcpy(out + begin, last, static_cast<std::size_t>(n - begin) * sizeof(float));
}

}  // namespace
}  // namespace pi2::avx512
