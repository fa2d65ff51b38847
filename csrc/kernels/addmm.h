// A small matrix product that adds to y, shared by all vector instruction sets: tiles of kTokens tokens by kVectors
// vectors of columns stay in registers over all rows of w. `Simd` as in kernels/plain.h.
#pragma once

#include "pi2/kernels.h"

namespace pi2 {

template <class Simd, int kTokens, int kVectors>
inline void addmm_tile(const float* const* h_T, const float* w, std::int64_t ldw, std::int64_t count, std::int64_t at,
                       float* const* y_T) {
  typename Simd::Float sum[kTokens][kVectors];
  const float* h[kTokens];
  w += at;
  for (int t = 0; t < kTokens; ++t) {
    h[t] = h_T[t];
    for (int v = 0; v < kVectors; ++v) sum[t][v] = Simd::load_floats(y_T[t] + at + v * Simd::kLanes);
  }
  for (std::int64_t i = 0; i < count; ++i, w += ldw) {
    typename Simd::Float row[kVectors];
    for (int v = 0; v < kVectors; ++v) row[v] = Simd::load_floats(w + v * Simd::kLanes);
    for (int t = 0; t < kTokens; ++t) {
      const typename Simd::Float factor = Simd::set1(h[t][i]);
      for (int v = 0; v < kVectors; ++v) sum[t][v] = Simd::fma(factor, row[v], sum[t][v]);
    }
  }
  for (int t = 0; t < kTokens; ++t)
    for (int v = 0; v < kVectors; ++v) Simd::store_floats(y_T[t] + at + v * Simd::kLanes, sum[t][v]);
}

template <class Simd, int kTokens, int kVectors>
inline void addmm(PI2_ADDMM_ARGS) {
  constexpr std::int64_t kWidth = kVectors * Simd::kLanes;
  std::int64_t at = first;
  const std::int64_t end = first + width;
  for (; at + kWidth <= end; at += kWidth) {
    std::int64_t t = 0;
    for (; t + kTokens <= tokens; t += kTokens)
      addmm_tile<Simd, kTokens, kVectors>(h_T + t, w, ldw, count, at, y_T + t);
    for (; t < tokens; ++t) addmm_tile<Simd, 1, kVectors>(h_T + t, w, ldw, count, at, y_T + t);
  }
  for (; at < end; at += Simd::kLanes) {  // up to kLanes at a time
    const std::int64_t left = end - at < Simd::kLanes ? end - at : Simd::kLanes;
    for (std::int64_t t = 0; t < tokens; ++t) {
      typename Simd::Float sum = Simd::load_floats(y_T[t] + at, left);
      for (std::int64_t i = 0; i < count; ++i)
        sum = Simd::fma(Simd::set1(h_T[t][i]), Simd::load_floats(w + i * ldw + at, left), sum);
      Simd::store_floats(y_T[t] + at, sum, left);
    }
  }
}

}  // namespace pi2
