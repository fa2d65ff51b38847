// Products of bytes by SMMLA: two rows by two tokens, thirty-two in one instruction. An odd row or token goes by SDOT,
// with the same bits.
#pragma once

#include "kernels/neon_dotprod/impl.h"

namespace pi2::neon {
namespace {

// Lanes: row 0 token 0, row 0 token 1, row 1 token 0, row 1 token 1.
inline int32x4_t multiply(int32x4_t sum, int8x16_t w0, int8x16_t w1, int8x16_t x0, int8x16_t x1) {
  const int64x2_t w0_ = vreinterpretq_s64_s8(w0), w1_ = vreinterpretq_s64_s8(w1);
  const int64x2_t x0_ = vreinterpretq_s64_s8(x0), x1_ = vreinterpretq_s64_s8(x1);
  sum = vmmlaq_s32(sum, vreinterpretq_s8_s64(vzip1q_s64(w0_, w1_)), vreinterpretq_s8_s64(vzip1q_s64(x0_, x1_)));
  return vmmlaq_s32(sum, vreinterpretq_s8_s64(vzip2q_s64(w0_, w1_)), vreinterpretq_s8_s64(vzip2q_s64(x0_, x1_)));
}

template <class Format>
inline void dot_a8_square(const void* const* rows, const void* const* x_T, std::int64_t n, float* out, std::int64_t ldo,
                          const void* const* next, std::int64_t pace) {
  const std::int64_t n_groups = groups(n);
  NextRows<Simd, 2> ahead{next, pace};
  Step<Format> w[2];
  Input x[2];
  float32x4_t acc[4];
  for (int i = 0; i < 4; ++i) acc[i] = vdupq_n_f32(0);
  for (int t = 0; t < 2; ++t) x[t].start(x_T[t], n);
  for (std::int64_t g = 0; g < n_groups; g += kStepGroups) {
    ahead.step();
    for (int r = 0; r < 2; ++r) w[r].at(static_cast<const char*>(rows[r]), g, n_groups);
    int32x4_t by_group[kStepGroups];
    for (int i = 0; i < kStepGroups; ++i) {
      const Group w0 = w[0].group(i), w1 = w[1].group(i), x0 = x[0].group(i), x1 = x[1].group(i);
      by_group[i] = multiply(vdupq_n_s32(0), w0.first, w1.first, x0.first, x1.first);
      by_group[i] = multiply(by_group[i], w0.second, w1.second, x0.second, x1.second);
    }
    // Transposed: each row and token gets its four groups' sums.
    const int32x4_t even01 = vtrn1q_s32(by_group[0], by_group[1]), odd01 = vtrn2q_s32(by_group[0], by_group[1]);
    const int32x4_t even23 = vtrn1q_s32(by_group[2], by_group[3]), odd23 = vtrn2q_s32(by_group[2], by_group[3]);
    const int64x2_t e01 = vreinterpretq_s64_s32(even01), e23 = vreinterpretq_s64_s32(even23);
    const int64x2_t o01 = vreinterpretq_s64_s32(odd01), o23 = vreinterpretq_s64_s32(odd23);
    const int32x4_t sums[4] = {vreinterpretq_s32_s64(vzip1q_s64(e01, e23)), vreinterpretq_s32_s64(vzip1q_s64(o01, o23)),
                               vreinterpretq_s32_s64(vzip2q_s64(e01, e23)),
                               vreinterpretq_s32_s64(vzip2q_s64(o01, o23))};
    for (int i = 0; i < 4; ++i) acc[i] = add_groups(acc[i], sums[i], w[i / 2].scale(), x[i % 2].scale());
    for (int t = 0; t < 2; ++t) x[t].next();
  }
  for (int i = 0; i < 4; ++i) out[i / 2 * ldo + i % 2] = vaddvq_f32(acc[i]);
}

template <class Format>
inline void dot_a8_matrix(PI2_DOT_ARGS) {
  const std::int64_t steps = (groups(n) + kStepGroups - 1) / kStepGroups;
  return over_rows<over_tokens<4, dot_a8_tile<Format, DotProducts, 1, 4>, dot_a8_tile<Format, DotProducts, 1, 1>>,
                   over_tokens<2, dot_a8_square<Format>, dot_a8_tile<Format, DotProducts, 2, 1>>>(
      rows, count, x_T, tokens, n, out_RT, next, groups(n) * (Format::kBytes + 2), steps);
}

}  // namespace
}  // namespace pi2::neon
