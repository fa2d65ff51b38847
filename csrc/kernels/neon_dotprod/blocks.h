// Blocks of 16 rows, four to a vector, with int8 activations: SDOT of four columns of each row and four values of x,
// which are one lane of a vector of sixteen.
#pragma once

#include "kernels/blocks.h"
#include "kernels/neon/a8.h"

namespace pi2::neon {
namespace {

struct BlockSimd : Simd {
  static constexpr int kTogether = 1;

  static Float to_floats(Int v) { return vcvtq_f32_s32(v); }
  static Float scales(const char* p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(reinterpret_cast<const std::uint8_t*>(p))));
  }
  static float quantize_group(const float* x, std::int64_t count, std::int8_t* out) {
    return neon::quantize_group(x, count, out);
  }
};

// A group of x for each token.
template <int kTokens>
struct BlockInput {
  int8x16_t first[kTokens], second[kTokens];

  BlockInput(const std::int8_t* const (&x)[kTokens], std::int64_t k) {
    for (int t = 0; t < kTokens; ++t) {
      first[t] = vld1q_s8(x[t] + k);
      second[t] = vld1q_s8(x[t] + k + 16);
    }
  }
};

struct BlockQ4 : BlockSimd {
  static constexpr std::int64_t kBytes = 4 * 64;
  static constexpr std::int32_t kOffset = 8;

  template <int kTokens>
  static void group(const char* w, const std::int8_t* const (&x)[kTokens], std::int64_t k,
                    const std::int32_t (&start)[kTokens], Int (&sums)[kTogether][kTokens]) {
    const BlockInput<kTokens> input(x, k);
    for (int t = 0; t < kTokens; ++t) sums[0][t] = vdupq_n_s32(start[t]);
    step<0>(w, input, sums[0]);
    step<1>(w, input, sums[0]);
    step<2>(w, input, sums[0]);
    step<3>(w, input, sums[0]);
  }

  template <int kStep, int kTokens>
  static void step(const char* w, const BlockInput<kTokens>& x, Int (&sums)[kTokens]) {
    const uint8x16_t bytes = vld1q_u8(reinterpret_cast<const std::uint8_t*>(w + 64 * kStep));
    const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
    const int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
    for (int t = 0; t < kTokens; ++t)
      sums[t] = vdotq_laneq_s32(vdotq_laneq_s32(sums[t], low, x.first[t], kStep), high, x.second[t], kStep);
  }
};

// `Products` is how unsigned bytes of weights are multiplied, and how much too large they are for it.
template <class Products>
struct BlockQ8 : BlockSimd {
  static constexpr std::int64_t kBytes = 8 * 64;
  static constexpr std::int32_t kOffset = Products::kOffset;

  template <int kTokens>
  static void group(const char* w, const std::int8_t* const (&x)[kTokens], std::int64_t k,
                    const std::int32_t (&start)[kTokens], Int (&sums)[kTogether][kTokens]) {
    const BlockInput<kTokens> input(x, k);
    for (int t = 0; t < kTokens; ++t) sums[0][t] = vdupq_n_s32(start[t]);
    step<0>(w, input.first, sums[0]);
    step<1>(w, input.first, sums[0]);
    step<2>(w, input.first, sums[0]);
    step<3>(w, input.first, sums[0]);
    step<0>(w + 256, input.second, sums[0]);
    step<1>(w + 256, input.second, sums[0]);
    step<2>(w + 256, input.second, sums[0]);
    step<3>(w + 256, input.second, sums[0]);
  }

  template <int kStep, int kTokens>
  static void step(const char* w, const int8x16_t (&x)[kTokens], Int (&sums)[kTokens]) {
    const auto values = Products::values(vld1q_u8(reinterpret_cast<const std::uint8_t*>(w + 64 * kStep)));
    for (int t = 0; t < kTokens; ++t) sums[t] = Products::template dot<kStep>(sums[t], values, x[t]);
  }
};

struct SignedProducts {
  static constexpr std::int32_t kOffset = 0;
  static int8x16_t values(uint8x16_t v) { return vreinterpretq_s8_u8(veorq_u8(v, vdupq_n_u8(128))); }
  template <int kLane>
  static int32x4_t dot(int32x4_t sum, int8x16_t w, int8x16_t x) {
    return vdotq_laneq_s32(sum, w, x, kLane);
  }
};

}  // namespace
}  // namespace pi2::neon
