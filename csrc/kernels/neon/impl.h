// NEON (plain armv8-a, 64 bits) as kernels/plain.h, q4.h and q8.h want it. Everything has internal linkage: the folders
// neon_dotprod and neon_i8mm compile it with other flags, and the linker must not mix the results.
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "kernels/plain.h"

namespace pi2::neon {
namespace {

struct Simd {
  using Float = float32x4_t;
  using Int = int32x4_t;
  static constexpr std::int64_t kLanes = 4;

  static Float zero() { return vdupq_n_f32(0); }
  static Float set1(float v) { return vdupq_n_f32(v); }
  static Float add(Float a, Float b) { return vaddq_f32(a, b); }
  static Float mul(Float a, Float b) { return vmulq_f32(a, b); }
  static Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  static Float max(Float a, Float b) { return vmaxq_f32(a, b); }
  static float reduce(Float v) { return vaddvq_f32(v); }
  static float reduce_max(Float v) { return vmaxvq_f32(v); }
  static void reduce4(Float a, Float b, Float c, Float d, float* out) {
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
  }
  static Float shift_exponent(Float p, Float t) {
    const Int n = vshlq_n_s32(vreinterpretq_s32_f32(t), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), n));
  }
  static Float zero_below(Float x, Float least, Float v) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), vcltq_f32(x, least)));
  }

  static Float load_floats(const float* p) { return vld1q_f32(p); }
  static Float load_floats(const float* p, std::int64_t left) {
    float padded[kLanes] = {};
    std::memcpy(padded, p, static_cast<std::size_t>(left) * sizeof(float));
    return vld1q_f32(padded);
  }
  static void store_floats(float* p, Float v) { vst1q_f32(p, v); }
  static void store_floats(float* p, Float v, std::int64_t left) {
    float padded[kLanes];
    vst1q_f32(padded, v);
    std::memcpy(p, padded, static_cast<std::size_t>(left) * sizeof(float));
  }

  // A step is one group, so none is ever past the row's end. The offset of 8 is the sign bit turned over.
  static Int q4_values(const char* p, std::int64_t) {
    const uint8x16_t bytes = vld1q_u8(reinterpret_cast<const std::uint8_t*>(p));
    return vreinterpretq_s32_u8(veorq_u8(bytes, vdupq_n_u8(0x88)));
  }
  template <int kJ>
  static Float q4_weights(Int values) {
    if constexpr (kJ < 7) values = vshlq_n_s32(values, 28 - 4 * kJ);
    return vcvtq_f32_s32(vshrq_n_s32(values, 28));
  }
  static Float q4_scales(const char* p, std::int64_t) { return set1(half(p)); }

  static void q8_weights(const char* p, Float (&w)[8]) {
    for (int j = 0; j < 2; ++j) {
      const int8x16_t bytes = vld1q_s8(reinterpret_cast<const std::int8_t*>(p + 16 * j));
      const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
      w[4 * j] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
      w[4 * j + 1] = vcvtq_f32_s32(vmovl_high_s16(low));
      w[4 * j + 2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
      w[4 * j + 3] = vcvtq_f32_s32(vmovl_high_s16(high));
    }
  }
  static float half(const char* p) {
    __fp16 value;
    std::memcpy(&value, p, sizeof(value));
    return value;
  }
};

template <class Format>
inline float32x4_t load_tail(const char* p, std::int64_t left) {
  char padded[Simd::kLanes * Format::kBytes] = {};
  std::memcpy(padded, p, static_cast<std::size_t>(left * Format::kBytes));
  return Format::load(padded);
}

struct F32 : Simd {
  static constexpr std::int64_t kBytes = 4;
  static Float load(const char* p) { return vld1q_f32(reinterpret_cast<const float*>(p)); }
  static Float load(const char* p, std::int64_t left) { return load_tail<F32>(p, left); }
};

struct BF16 : Simd {
  static constexpr std::int64_t kBytes = 2;
  static Float load(const char* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(p)), 16));
  }
  static Float load(const char* p, std::int64_t left) { return load_tail<BF16>(p, left); }
};

struct F16 : Simd {
  static constexpr std::int64_t kBytes = 2;
  static Float load(const char* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(p))));
  }
  static Float load(const char* p, std::int64_t left) { return load_tail<F16>(p, left); }
};

struct I8 : Simd {
  static constexpr std::int64_t kBytes = 1;
  static Float load(const char* p) {
    std::uint32_t four;
    std::memcpy(&four, p, sizeof(four));
    const int8x8_t bytes = vreinterpret_s8_u32(vdup_n_u32(four));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
  }
  static Float load(const char* p, std::int64_t left) { return load_tail<I8>(p, left); }
};

}  // namespace
}  // namespace pi2::neon
