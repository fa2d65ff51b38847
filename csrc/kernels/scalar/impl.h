// The scalar kernels: the reference of every other instruction set, and what runs where there is none.
#pragma once

#include "kernels/scalar/convert.h"
#include "pi2/kernels.h"

namespace pi2::scalar {

template <class Format>
inline void dot(PI2_DOT_ARGS) {
  (void)next;
  for (std::int64_t r = 0; r < count; ++r) {
    const auto* w = static_cast<const typename Format::Storage*>(rows[r]);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* x = static_cast<const float*>(x_T[t]);
      float sum[4] = {0, 0, 0, 0};  // four chains: the accuracy of the vector kernels, and some of their speed
      std::int64_t k = 0;
      for (; k + 4 <= n; k += 4) {
        for (int j = 0; j < 4; ++j) sum[j] += Format::widen(w[k + j]) * x[k + j];
      }
      for (int j = 0; k < n; ++k, ++j) sum[j] += Format::widen(w[k]) * x[k];
      out_RT[r * tokens + t] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
  }
}

template <class Format>
inline void axpy(PI2_AXPY_ARGS) {
  (void)next;
  for (std::int64_t r = 0; r < count; ++r) {
    const auto* w = static_cast<const typename Format::Storage*>(rows[r]);
    for (std::int64_t k = 0; k < n; ++k) y[k] += h[r] * Format::widen(w[k]);
  }
}

}  // namespace pi2::scalar
