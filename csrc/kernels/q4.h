// int4 rows with float activations, shared by all vector instruction sets with lanes of 32 bits. Products are exact in
// float.
//
// A step is 4 bytes of values a lane. Nibble j of lane l is a weight of the step's group l / 4, so two shifts give
// kLanes weights, and x arranged in the same order makes shuffles unnecessary; lanes keep to one group, so a step needs
// one multiplication by the scales. Besides the members for plain.h, `Simd` has:
//   Int, q4_values(p, groups_left)  the nibbles of a step, anything for groups past the row's end
//   q4_weights<j>(Int)              nibble j of each lane as a weight (-8..7) in float
//   q4_scales(p, groups_left)       a step's scales, each over the four lanes of its group; 0 past the row's end
#pragma once

#include "kernels/fetch_rows.h"
#include "kernels/over_tokens.h"
#include "pi2/kernels.h"

namespace pi2 {

template <class Simd>
struct Q4 {
  using Float = typename Simd::Float;
  static constexpr std::int64_t kLanes = Simd::kLanes;
  static constexpr std::int64_t kStepGroups = kLanes / 4;
  static constexpr std::int64_t kStep = kStepGroups * kGroup;  // weights
  static constexpr std::int64_t kBytes = kGroup / 2;           // of a group's values

  // The index in x of slot kLanes j + l of a step.
  static constexpr std::int64_t place(std::int64_t slot) {
    const std::int64_t j = slot / kLanes, l = slot % kLanes;
    return (l / 4) * kGroup + 4 * (l % 4) + j / 2 + 16 * (j % 2);
  }

  static void prepare(PI2_PREPARE_ARGS) {
    auto* to = static_cast<float*>(out);
    for (std::int64_t slot = 0; slot < padded(n); ++slot) {
      const std::int64_t k = slot / kStep * kStep + place(slot % kStep);
      to[slot] = k < n ? x[k] : 0.0f;
    }
  }

  static void restore(PI2_RESTORE_ARGS) {
    for (std::int64_t slot = 0; slot < padded(n); ++slot) {
      const std::int64_t k = slot / kStep * kStep + place(slot % kStep);
      if (k < n) out[k] = y[slot];
    }
  }

  // Even and odd nibbles of a step in two chains.
  template <int kRows, int kTokens>
  struct DotStep {
    typename Simd::Int values[kRows];
    const float* x[kTokens];
    Float even[kRows][kTokens], odd[kRows][kTokens];

    template <int kJ>
    void pair() {
      Float w0[kRows], w1[kRows];
      for (int r = 0; r < kRows; ++r) {
        w0[r] = Simd::template q4_weights<kJ>(values[r]);
        w1[r] = Simd::template q4_weights<kJ + 1>(values[r]);
      }
      for (int t = 0; t < kTokens; ++t) {
        const Float x0 = Simd::load_floats(x[t] + kLanes * kJ), x1 = Simd::load_floats(x[t] + kLanes * (kJ + 1));
        for (int r = 0; r < kRows; ++r) {
          even[r][t] = kJ == 0 ? Simd::mul(w0[r], x0) : Simd::fma(w0[r], x0, even[r][t]);
          odd[r][t] = kJ == 0 ? Simd::mul(w1[r], x1) : Simd::fma(w1[r], x1, odd[r][t]);
        }
      }
    }
  };

  template <int kRows, int kTokens>
  static void dot_tile(const void* const* rows, const void* const* x_T, std::int64_t n, float* out, std::int64_t ldo,
                       const void* const* next, std::int64_t pace) {
    const std::int64_t n_groups = groups(n);
    NextRows<Simd, kRows> ahead{next, pace};
    const char* w[kRows];
    Float acc[kRows][kTokens];
    DotStep<kRows, kTokens> step;
    for (int t = 0; t < kTokens; ++t) step.x[t] = static_cast<const float*>(x_T[t]);
    for (int r = 0; r < kRows; ++r) {
      w[r] = row_at(rows, r);
      for (int t = 0; t < kTokens; ++t) acc[r][t] = Simd::zero();
    }
    for (std::int64_t g = 0; g < n_groups; g += kStepGroups) {
      ahead.step();
      for (int r = 0; r < kRows; ++r) step.values[r] = Simd::q4_values(w[r] + g * kBytes, n_groups - g);
      step.template pair<0>();
      step.template pair<2>();
      step.template pair<4>();
      step.template pair<6>();
      for (int r = 0; r < kRows; ++r) {
        const Float scale = Simd::q4_scales(w[r] + n_groups * kBytes + 2 * g, n_groups - g);
        for (int t = 0; t < kTokens; ++t)
          acc[r][t] = Simd::fma(scale, Simd::add(step.even[r][t], step.odd[r][t]), acc[r][t]);
      }
      for (int t = 0; t < kTokens; ++t) step.x[t] += kStep;
    }
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < kTokens; ++t) out[r * ldo + t] = Simd::reduce(acc[r][t]);
  }

  static void dot(PI2_DOT_ARGS) {
    const std::int64_t steps = (n + kStep - 1) / kStep;
    return over_rows<over_tokens<4, dot_tile<1, 4>, dot_tile<1, 1>>, over_tokens<2, dot_tile<2, 2>, dot_tile<2, 1>>,
                     over_tokens<2, dot_tile<4, 2>, dot_tile<4, 1>>>(rows, count, x_T, tokens, n, out_RT, next,
                                                                     row_bytes(DType::kQ4, n), steps);
  }

  template <int kRows>
  struct AxpyStep {
    typename Simd::Int values[kRows];
    Float scale[kRows];

    template <int kJ>
    void add(float* y) const {
      Float sum = Simd::load_floats(y + kLanes * kJ);
      for (int r = 0; r < kRows; ++r) sum = Simd::fma(scale[r], Simd::template q4_weights<kJ>(values[r]), sum);
      Simd::store_floats(y + kLanes * kJ, sum);
    }
  };

  template <int kRows>
  static void axpy_rows(float* y, const void* const* rows, const float* h, std::int64_t n, const void* const* next) {
    const std::int64_t n_groups = groups(n);
    AxpyStep<kRows> step;
    if (next != nullptr) fetch_rows<Simd, kRows>(next, n_groups * kBytes, row_bytes(DType::kQ4, n));  // scales
    for (std::int64_t g = 0; g < n_groups; g += kStepGroups, y += kStep) {
      if (next != nullptr && g * kBytes % 64 == 0) fetch_rows<Simd, kRows>(next, g * kBytes, g * kBytes + 64);
      for (int r = 0; r < kRows; ++r) {
        const char* w = static_cast<const char*>(rows[r]);
        step.values[r] = Simd::q4_values(w + g * kBytes, n_groups - g);
        step.scale[r] = Simd::mul(Simd::set1(h[r]), Simd::q4_scales(w + n_groups * kBytes + 2 * g, n_groups - g));
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

  static void axpy(PI2_AXPY_ARGS) {
    over_count<axpy_rows<1>, axpy_rows<2>, axpy_rows<3>, axpy_rows<4>>(y, rows, h, count, n, next);
  }
};

}  // namespace pi2
