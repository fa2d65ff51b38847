// int8 rows in groups with float activations, shared by all vector instruction sets. Products are exact in float; x and
// y are in plain order, and rows are whole groups, so there is no tail. Besides the members for plain.h, `Simd` has:
// q8_weights(p, w) (a group as floats) and half(p) (a stored scale as float).
#pragma once

#include <cstring>

#include "kernels/fetch_rows.h"
#include "kernels/over_tokens.h"
#include "pi2/kernels.h"

namespace pi2 {

template <class Simd>
struct Q8 {
  using Float = typename Simd::Float;
  static constexpr std::int64_t kLanes = Simd::kLanes;
  static constexpr int kVectors = static_cast<int>(kGroup / kLanes);

  static void prepare(PI2_PREPARE_ARGS) {
    auto* to = static_cast<float*>(out);
    std::memcpy(to, x, static_cast<std::size_t>(n) * sizeof(float));
    std::memset(to + n, 0, static_cast<std::size_t>(padded(n) - n) * sizeof(float));
  }

  static void restore(PI2_RESTORE_ARGS) { std::memcpy(out, y, static_cast<std::size_t>(n) * sizeof(float)); }

  // Two chains of more than two vectors, one of two.
  static Float group_sum(const Float (&weights)[kVectors], const float* x) {
    Float even = Simd::mul(weights[0], Simd::load_floats(x));
    if constexpr (kVectors == 2) return Simd::fma(weights[1], Simd::load_floats(x + kLanes), even);
    Float odd = Simd::mul(weights[1], Simd::load_floats(x + kLanes));
    for (int j = 2; j < kVectors; j += 2) {
      even = Simd::fma(weights[j], Simd::load_floats(x + kLanes * j), even);
      odd = Simd::fma(weights[j + 1], Simd::load_floats(x + kLanes * (j + 1)), odd);
    }
    return Simd::add(even, odd);
  }

  template <int kRows, int kTokens>
  static void dot_tile(const void* const* rows, const void* const* x_T, std::int64_t n, float* out, std::int64_t ldo,
                       const void* const* next, std::int64_t pace) {
    const std::int64_t n_groups = groups(n);
    NextRows<Simd, kRows> ahead{next, pace};
    const char* w[kRows];
    const float* x[kTokens];
    Float acc[kRows][kTokens];
    for (int t = 0; t < kTokens; ++t) x[t] = static_cast<const float*>(x_T[t]);
    for (int r = 0; r < kRows; ++r) {
      w[r] = row_at(rows, r);
      for (int t = 0; t < kTokens; ++t) acc[r][t] = Simd::zero();
    }
    for (std::int64_t g = 0; g < n_groups; ++g) {
      ahead.step();
      for (int r = 0; r < kRows; ++r) {
        Float weights[kVectors];
        Simd::q8_weights(w[r] + g * kGroup, weights);
        const Float scale = Simd::set1(Simd::half(w[r] + n_groups * kGroup + 2 * g));
        for (int t = 0; t < kTokens; ++t) {
          acc[r][t] = Simd::fma(scale, group_sum(weights, x[t] + g * kGroup), acc[r][t]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < kTokens; ++t) out[r * ldo + t] = Simd::reduce(acc[r][t]);
  }

  static void dot(PI2_DOT_ARGS) {
    return over_rows<over_tokens<4, dot_tile<1, 4>, dot_tile<1, 1>>, over_tokens<2, dot_tile<2, 2>, dot_tile<2, 1>>>(
        rows, count, x_T, tokens, n, out_RT, next, row_bytes(DType::kQ8, n), groups(n));
  }

  template <int kRows>
  static void axpy_rows(float* y, const void* const* rows, const float* h, std::int64_t n, const void* const* next) {
    const std::int64_t n_groups = groups(n);
    if (next != nullptr) fetch_rows<Simd, kRows>(next, n_groups * kGroup, row_bytes(DType::kQ8, n));  // scales
    for (std::int64_t g = 0; g < n_groups; ++g, y += kGroup) {
      if (next != nullptr && g * kGroup % 64 == 0) fetch_rows<Simd, kRows>(next, g * kGroup, g * kGroup + 64);
      Float sum[kVectors];
      for (int j = 0; j < kVectors; ++j) sum[j] = Simd::load_floats(y + kLanes * j);
      for (int r = 0; r < kRows; ++r) {
        const char* w = static_cast<const char*>(rows[r]);
        Float weights[kVectors];
        Simd::q8_weights(w + g * kGroup, weights);
        const Float scale = Simd::set1(h[r] * Simd::half(w + n_groups * kGroup + 2 * g));
        for (int j = 0; j < kVectors; ++j) sum[j] = Simd::fma(scale, weights[j], sum[j]);
      }
      for (int j = 0; j < kVectors; ++j) Simd::store_floats(y + kLanes * j, sum[j]);
    }
  }

  static void axpy(PI2_AXPY_ARGS) {
    over_count<axpy_rows<1>, axpy_rows<2>, axpy_rows<3>, axpy_rows<4>>(y, rows, h, count, n, next);
  }
};

}  // namespace pi2
