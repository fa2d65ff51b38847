// AVX-512 kernels over quantised rows. Float activations: every product is exact in float.
//
// int4: a step is 128 weights, 64 bytes as 16 lanes of 32 bits. Nibble j of lane l is a weight of group l / 4, so that
// a shift by 4 j and a table look-up (vpermps reads the low four bits of each lane) give 16 weights, and x arranged in
// the same order makes shuffles unnecessary; lanes keep to one group, so a step needs one multiplication by the scales.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels/over_tokens.h"
#include "pi2/kernels.h"

// Unnamed: functions that are compiled with other flags elsewhere must stay apart (the linker would keep one of them).
namespace pi2::avx512 {
namespace {

constexpr std::int64_t kStep = 128;  // weights per step

// Fetches the bytes [begin, end) of every row of a hint.
template <int kRows>
inline void fetch_rows(const void* const* next, std::int64_t begin, std::int64_t end) {
  for (std::int64_t at = begin; at < end; at += 64)
    for (int r = 0; r < kRows; ++r) _mm_prefetch(static_cast<const char*>(next[r]) + at, _MM_HINT_T0);
}

// Place in x of what slot 16 j + l of a step holds.
constexpr std::int64_t place_of_q4(std::int64_t slot) {
  const std::int64_t j = slot / 16, l = slot % 16;
  return (l / 4) * kGroup + 4 * (l % 4) + j / 2 + 16 * (j & 1);
}

inline __m512 q4_values() { return _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8); }

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

template <int kJ>
inline __m512 q4_weights(__m512i nibbles, __m512 table) {
  return _mm512_permutexvar_ps(kJ == 0 ? nibbles : _mm512_srli_epi32(nibbles, 4 * kJ), table);
}

// One step of one row for kTokens tokens: even and odd nibbles in two chains.
template <int kRows, int kTokens>
struct Q4Step {
  __m512i nibbles[kRows];
  const float* x[kTokens];  // of this step
  __m512 even[kRows][kTokens], odd[kRows][kTokens];
  __m512 table;

  template <int kJ>
  void pair() {
    __m512 w0[kRows], w1[kRows];
    for (int r = 0; r < kRows; ++r) {
      w0[r] = q4_weights<kJ>(nibbles[r], table);
      w1[r] = q4_weights<kJ + 1>(nibbles[r], table);
    }
    for (int t = 0; t < kTokens; ++t) {
      const __m512 x0 = _mm512_loadu_ps(x[t] + 16 * kJ), x1 = _mm512_loadu_ps(x[t] + 16 * kJ + 16);
      for (int r = 0; r < kRows; ++r) {
        even[r][t] = kJ == 0 ? _mm512_mul_ps(w0[r], x0) : _mm512_fmadd_ps(w0[r], x0, even[r][t]);
        odd[r][t] = kJ == 0 ? _mm512_mul_ps(w1[r], x1) : _mm512_fmadd_ps(w1[r], x1, odd[r][t]);
      }
    }
  }
};

template <int kRows, int kTokens>
inline void dot_q4_tile(const void* const* rows, const void* const* x_T, std::int64_t n, float* out, std::int64_t ldo,
                        const char* next, std::int64_t lines) {
  const std::int64_t n_groups = groups(n);
  const char* w[kRows];
  const char* s[kRows];
  __m512 acc[kRows][kTokens];
  Q4Step<kRows, kTokens> step;
  step.table = q4_values();
  for (int t = 0; t < kTokens; ++t) step.x[t] = static_cast<const float*>(x_T[t]);
  for (int r = 0; r < kRows; ++r) {
    w[r] = static_cast<const char*>(rows[r]);
    s[r] = w[r] + n_groups * (kGroup / 2);
    for (int t = 0; t < kTokens; ++t) acc[r][t] = _mm512_setzero_ps();
  }
  for (std::int64_t g = 0; g < n_groups; g += 4) {
    for (std::int64_t line = 0; line < lines; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T0);
    for (int r = 0; r < kRows; ++r) step.nibbles[r] = nibbles_of_4(w[r] + g * (kGroup / 2), n_groups - g);
    step.template pair<0>();
    step.template pair<2>();
    step.template pair<4>();
    step.template pair<6>();
    for (int r = 0; r < kRows; ++r) {
      const __m512 scale = scales_of_4(s[r] + 2 * g, n_groups - g);
      for (int t = 0; t < kTokens; ++t)
        acc[r][t] = _mm512_fmadd_ps(scale, _mm512_add_ps(step.even[r][t], step.odd[r][t]), acc[r][t]);
    }
    for (int t = 0; t < kTokens; ++t) step.x[t] += kStep;
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t) out[r * ldo + t] = _mm512_reduce_add_ps(acc[r][t]);
}

inline void dot_q4(PI2_DOT_ARGS) {
  const std::int64_t steps = (n + kStep - 1) / kStep;
  if (count == 1)
    return over_tokens<4, dot_q4_tile<1, 4>, dot_q4_tile<1, 1>>(rows, count, x_T, tokens, n, out_RT, next, next_bytes,
                                                                steps);
  return over_tokens<2, dot_q4_tile<2, 2>, dot_q4_tile<2, 1>>(rows, count, x_T, tokens, n, out_RT, next, next_bytes,
                                                              steps);
}

// Places in x of slots 16 j..16 j + 15 of a step; and, for restore, the slots of 16 places.
struct Q4Order {
  alignas(64) std::int32_t place[kStep], slot[kStep];

  constexpr Q4Order() : place(), slot() {
    for (std::int64_t s = 0; s < kStep; ++s) {
      place[s] = static_cast<std::int32_t>(place_of_q4(s));
      slot[place_of_q4(s)] = static_cast<std::int32_t>(s);
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

template <int kRows>
struct Q4Axpy {
  __m512i nibbles[kRows];
  __m512 scale[kRows];
  __m512 table;

  template <int kJ>
  void add(float* y) const {
    __m512 sum = _mm512_loadu_ps(y + 16 * kJ);
    for (int r = 0; r < kRows; ++r) sum = _mm512_fmadd_ps(scale[r], q4_weights<kJ>(nibbles[r], table), sum);
    _mm512_storeu_ps(y + 16 * kJ, sum);
  }
};

template <int kRows>
inline void axpy_q4_rows(float* y, const void* const* rows, const float* h, std::int64_t n, const void* const* next) {
  const std::int64_t n_groups = groups(n);
  Q4Axpy<kRows> step;
  step.table = q4_values();
  if (next != nullptr) fetch_rows<kRows>(next, n_groups * (kGroup / 2), row_bytes(DType::kQ4, n));
  for (std::int64_t g = 0; g < n_groups; g += 4, y += kStep) {
    if (next != nullptr) fetch_rows<kRows>(next, g * (kGroup / 2), g * (kGroup / 2) + 1);
    for (int r = 0; r < kRows; ++r) {
      const char* w = static_cast<const char*>(rows[r]);
      step.nibbles[r] = nibbles_of_4(w + g * (kGroup / 2), n_groups - g);
      step.scale[r] =
          _mm512_mul_ps(_mm512_set1_ps(h[r]), scales_of_4(w + n_groups * (kGroup / 2) + 2 * g, n_groups - g));
    }
    step.template add<0>(y);
    step.template add<1>(y);
    step.template add<2>(y);
    step.template add<3>(y);
    step.template add<4>(y);
    step.template add<5>(y);
    step.template add<6>(y);
    step.template add<7>(y);
  }
}

inline void axpy_q4(PI2_AXPY_ARGS) {
  switch (count) {
    case 1: return axpy_q4_rows<1>(y, rows, h, n, next);
    case 2: return axpy_q4_rows<2>(y, rows, h, n, next);
    case 3: return axpy_q4_rows<3>(y, rows, h, n, next);
    default: return axpy_q4_rows<4>(y, rows, h, n, next);
  }
}

// --- int8: plain order; rows are whole groups, so no tail ---

inline float scale_of_1(const char* scale) {
  std::uint16_t half;
  std::memcpy(&half, scale, sizeof(half));
  return _cvtsh_ss(half);
}

inline __m512 q8_weights(const char* values) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values))));
}

template <int kRows, int kTokens>
inline void dot_q8_tile(const void* const* rows, const void* const* x_T, std::int64_t n, float* out, std::int64_t ldo,
                        const char* next, std::int64_t lines) {
  const std::int64_t n_groups = groups(n);
  const char* w[kRows];
  const float* x[kTokens];
  __m512 acc[kRows][kTokens];
  for (int t = 0; t < kTokens; ++t) x[t] = static_cast<const float*>(x_T[t]);
  for (int r = 0; r < kRows; ++r) {
    w[r] = static_cast<const char*>(rows[r]);
    for (int t = 0; t < kTokens; ++t) acc[r][t] = _mm512_setzero_ps();
  }
  for (std::int64_t g = 0; g < n_groups; ++g) {
    for (std::int64_t line = 0; line < lines; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T0);
    for (int r = 0; r < kRows; ++r) {
      const __m512 scale = _mm512_set1_ps(scale_of_1(w[r] + n_groups * kGroup + 2 * g));
      const __m512 w0 = q8_weights(w[r] + g * kGroup), w1 = q8_weights(w[r] + g * kGroup + 16);
      for (int t = 0; t < kTokens; ++t) {
        const float* at = x[t] + g * kGroup;
        const __m512 sum = _mm512_fmadd_ps(w1, _mm512_loadu_ps(at + 16), _mm512_mul_ps(w0, _mm512_loadu_ps(at)));
        acc[r][t] = _mm512_fmadd_ps(scale, sum, acc[r][t]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t) out[r * ldo + t] = _mm512_reduce_add_ps(acc[r][t]);
}

inline void dot_q8(PI2_DOT_ARGS) {
  if (count == 1)
    return over_tokens<4, dot_q8_tile<1, 4>, dot_q8_tile<1, 1>>(rows, count, x_T, tokens, n, out_RT, next, next_bytes,
                                                                groups(n));
  return over_tokens<2, dot_q8_tile<2, 2>, dot_q8_tile<2, 1>>(rows, count, x_T, tokens, n, out_RT, next, next_bytes,
                                                              groups(n));
}

inline void prepare_q8(PI2_PREPARE_ARGS) {
  auto* to = static_cast<float*>(out);
  std::memcpy(to, x, static_cast<std::size_t>(n) * sizeof(float));
  std::memset(to + n, 0, static_cast<std::size_t>(padded(n) - n) * sizeof(float));
}

inline void restore_q8(PI2_RESTORE_ARGS) { std::memcpy(out, y, static_cast<std::size_t>(n) * sizeof(float)); }

template <int kRows>
inline void axpy_q8_rows(float* y, const void* const* rows, const float* h, std::int64_t n, const void* const* next) {
  const std::int64_t n_groups = groups(n);
  if (next != nullptr) fetch_rows<kRows>(next, n_groups * kGroup, row_bytes(DType::kQ8, n));
  for (std::int64_t g = 0; g < n_groups; ++g, y += kGroup) {
    if (next != nullptr && g % 2 == 0) fetch_rows<kRows>(next, g * kGroup, g * kGroup + 1);
    __m512 y0 = _mm512_loadu_ps(y), y1 = _mm512_loadu_ps(y + 16);
    for (int r = 0; r < kRows; ++r) {
      const char* w = static_cast<const char*>(rows[r]);
      const __m512 scale = _mm512_set1_ps(h[r] * scale_of_1(w + n_groups * kGroup + 2 * g));
      y0 = _mm512_fmadd_ps(scale, q8_weights(w + g * kGroup), y0);
      y1 = _mm512_fmadd_ps(scale, q8_weights(w + g * kGroup + 16), y1);
    }
    _mm512_storeu_ps(y, y0);
    _mm512_storeu_ps(y + 16, y1);
  }
}

inline void axpy_q8(PI2_AXPY_ARGS) {
  switch (count) {
    case 1: return axpy_q8_rows<1>(y, rows, h, n, next);
    case 2: return axpy_q8_rows<2>(y, rows, h, n, next);
    case 3: return axpy_q8_rows<3>(y, rows, h, n, next);
    default: return axpy_q8_rows<4>(y, rows, h, n, next);
  }
}

}  // namespace
}  // namespace pi2::avx512
