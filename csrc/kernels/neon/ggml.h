// ggml's blocks on NEON (kernels/ggml.h): 16 numbers of a group to a vector.
#pragma once

#include "kernels/ggml.h"
#include "kernels/neon/a8.h"

namespace pi2::neon {
namespace {

inline uint8x16_t load_bytes(const char* p) { return vld1q_u8(reinterpret_cast<const std::uint8_t*>(p)); }

template <int kParts>
struct GgmlSimd : Simd {
  // Two groups' to a vector.
  struct Pairs {
    Float of[2 * kParts];
  };
  struct Numbers {
    uint8x16_t first[4], second[4];
  };

  static Float bytes(const char* p) {
    std::uint32_t four;
    std::memcpy(&four, p, sizeof(four));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four))))));
  }
  static uint8x16_t low(uint8x16_t nibbles) { return vandq_u8(nibbles, vdupq_n_u8(15)); }
  static uint8x16_t high(uint8x16_t nibbles) { return vshrq_n_u8(nibbles, 4); }
  // `v` with those bits of `more`, which are so many places to the left there.
  static uint8x16_t with_bits(uint8x16_t v, uint8x16_t more, int left, std::uint8_t bits) {
    return vorrq_u8(v, vandq_u8(vshlq_u8(more, vdupq_n_s8(static_cast<std::int8_t>(-left))), vdupq_n_u8(bits)));
  }

  static void store(const Pairs& pairs, float* out) {
    for (int v = 0; v < 2 * kParts; ++v) vst1q_f32(out + 4 * v, pairs.of[v]);
  }
  static void store(const Numbers& numbers, char* out) {
    for (int i = 0; i < 4; ++i) {
      vst1q_u8(reinterpret_cast<std::uint8_t*>(out) + 16 * i, numbers.first[i]);
      vst1q_u8(reinterpret_cast<std::uint8_t*>(out) + 64 + 16 * i, numbers.second[i]);
    }
  }
};

// A group to a block.
template <DType kType>
struct GgmlSmall : GgmlSimd<1> {
  static constexpr DType kDType = kType;
  static constexpr bool kMin = kType != DType::kQ5_0, kFifth = kType != DType::kQ4_1;
  static constexpr std::int64_t kBlock = ggml_block(kType).bytes, kBits = kMin ? 4 : 2,
                                kNibbles = kBits + (kFifth ? 4 : 0);

  static Pairs pairs(const char* p) {
    std::uint16_t bits[8];
    for (int i = 0; i < 8; ++i) std::memcpy(bits + i, p + i / 2 * kBlock + (kMin ? i % 2 * 2 : 0), sizeof(bits[i]));
    const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(bits));
    return {{vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)}};
  }

  static Numbers numbers(const char* p, std::int64_t) {
    Numbers out;
    for (int i = 0; i < 4; ++i, p += kBlock) {
      const uint8x16_t nibbles = load_bytes(p + kNibbles);
      out.first[i] = low(nibbles);
      out.second[i] = high(nibbles);
      if constexpr (kFifth) {
        // Byte k gets the byte that has bit k, of which that bit counts.
        std::uint32_t word;
        std::memcpy(&word, p + kBits, sizeof(word));
        const uint8x16_t all = vreinterpretq_u8_u32(vdupq_n_u32(word)), five = vdupq_n_u8(16);
        const uint8x16_t which = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
        const uint8x16_t byte = vcombine_u8(vdup_n_u8(0), vdup_n_u8(1));
        const uint8x16_t set = vtstq_u8(vqtbl1q_u8(all, byte), which);
        const uint8x16_t set_later = vtstq_u8(vqtbl1q_u8(all, vaddq_u8(byte, vdupq_n_u8(2))), which);
        out.first[i] = vorrq_u8(out.first[i], vandq_u8(set, five));
        out.second[i] = vorrq_u8(out.second[i], vandq_u8(set_later, five));
      }
    }
    return out;
  }
};

template <DType kType>
struct GgmlK : GgmlSimd<2> {
  static constexpr DType kDType = kType;
  static constexpr bool kFifth = kType == DType::kQ5K;

  static Pairs pairs(const char* p) {
    const KScales k(p + 4);
    const float32x2_t both = vset_lane_f32(half(p + 2), vdup_n_f32(half(p)), 1);
    const float32x4_t by = vcombine_f32(both, both);
    Pairs out;
    for (int part = 0; part < 2; ++part) {
      const uint8x8_t scale = vcreate_u8(k.scale >> 32 * part), min = vcreate_u8(k.min >> 32 * part);
      const uint16x8_t eight = vmovl_u8(vzip1_u8(scale, min));
      out.of[2 * part] = vmulq_f32(vcvtq_f32_u32(vmovl_u16(vget_low_u16(eight))), by);
      out.of[2 * part + 1] = vmulq_f32(vcvtq_f32_u32(vmovl_high_u16(eight)), by);
    }
    return out;
  }

  static Numbers numbers(const char* p, std::int64_t part) {
    const char* nibbles = p + (kFifth ? 48 : 16) + 64 * part;
    Numbers out;
    for (int j = 0; j < 2; ++j) {
      const uint8x16_t first = load_bytes(nibbles + 32 * j), second = load_bytes(nibbles + 32 * j + 16);
      out.first[2 * j] = low(first);
      out.first[2 * j + 1] = high(first);
      out.second[2 * j] = low(second);
      out.second[2 * j + 1] = high(second);
    }
    for (int i = 0; kFifth && i < 4; ++i) {
      const int left = static_cast<int>(4 * part) + i - 4;
      out.first[i] = with_bits(out.first[i], load_bytes(p + 16), left, 16);
      out.second[i] = with_bits(out.second[i], load_bytes(p + 32), left, 16);
    }
    return out;
  }
};

struct GgmlQ6K : GgmlSimd<2> {
  static constexpr DType kDType = DType::kQ6K;

  static Pairs pairs(const char* p) {
    const int8x16_t bytes = vreinterpretq_s8_u8(load_bytes(p + 192));
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    Pairs out{{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
               vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
    for (Float& four : out.of) four = vmulq_n_f32(four, half(p + 208));
    return out;
  }

  static Numbers numbers(const char* p, std::int64_t part) {
    const char *nibbles = p + 64 * part, *more = p + 128 + 32 * part;
    Numbers out;
    for (int j = 0; j < 2; ++j) {  // groups 0 and 1 are low halves, 2 and 3 high ones
      const uint8x16_t first = load_bytes(nibbles + 32 * j), second = load_bytes(nibbles + 32 * j + 16);
      out.first[j] = low(first);
      out.first[2 + j] = high(first);
      out.second[j] = low(second);
      out.second[2 + j] = high(second);
    }
    for (int i = 0; i < 4; ++i) {
      out.first[i] = with_bits(out.first[i], load_bytes(more), 2 * i - 4, 48);
      out.second[i] = with_bits(out.second[i], load_bytes(more + 16), 2 * i - 4, 48);
    }
    return out;
  }
};

struct GgmlTQ2 : GgmlSimd<2> {
  static constexpr DType kDType = DType::kTQ2;

  static Pairs pairs(const char* p) {
    const Float d = vdupq_n_f32(half(p + 64));
    return {{d, d, d, d}};
  }

  static Numbers numbers(const char* p, std::int64_t part) {
    const uint8x16_t first = load_bytes(p + 32 * part), second = load_bytes(p + 32 * part + 16), none = vdupq_n_u8(0);
    Numbers out;
    for (int i = 0; i < 4; ++i) {
      out.first[i] = with_bits(none, first, 2 * i, 3);
      out.second[i] = with_bits(none, second, 2 * i, 3);
    }
    return out;
  }

  using Fields = uint32x4_t;
  static Fields fields(const char* p) {
    std::uint32_t four;
    std::memcpy(&four, p, sizeof(four));
    return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
  }
  template <int kS>
  static Float ternary(Fields v) {
    const uint32x4_t bits = vandq_u32(vshlq_u32(v, vdupq_n_s32(-2 * kS)), vdupq_n_u32(3));
    return vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(bits), vdupq_n_s32(1)));
  }
};

// With int8 activations. `Products` is how bytes are multiplied: see a8.h.
template <class Format, class Products>
struct Ggml : Format {
  using Sums = float32x4_t;  // a lane for each group of a part
  using Step = GgmlStep<Format>;
  static constexpr int kParts = GgmlRows<Format>::kParts;
  static constexpr bool kHalves = has_halves(Format::kDType);

  static Sums zero_sums() { return vdupq_n_f32(0); }
  static float total(Sums sums) { return vaddvq_f32(sums); }
  static float32x4_t of_four(const int32x4_t (&s)[4]) {
    return vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(s[0], s[1]), vpaddq_s32(s[2], s[3])));
  }

  static void add_step(Sums* sums, const Step& step, const GgmlInput& x) {
    const auto& [pairs, numbers] = step;
    for (int part = 0; part < kParts; ++part) {
      const float32x4_t a = vmulq_f32(pairs.of[2 * part], vld1q_f32(x.pairs + 8 * part));
      const float32x4_t b = vmulq_f32(pairs.of[2 * part + 1], vld1q_f32(x.pairs + 8 * part + 4));
      int32x4_t first[4], second[4];
      for (int i = 0; i < 4; ++i) {
        const std::int8_t* values = x.values + part * kGgmlPart + 16 * i;
        const Group w{vreinterpretq_s8_u8(numbers[part].first[i]), vreinterpretq_s8_u8(numbers[part].second[i])};
        const Group v{vld1q_s8(values), vld1q_s8(values + kGgmlPart / 2)};
        if constexpr (kHalves) {
          first[i] = Products::sum(w.first, v.first);
          second[i] = Products::sum(w.second, v.second);
        } else {
          first[i] = Products::sum(w, v);
        }
      }
      Sums sum = vfmaq_f32(*sums, vuzp1q_f32(a, b), of_four(first));
      if constexpr (kHalves) {
        sum = vfmaq_f32(sum, vuzp2q_f32(a, b), of_four(second));
        sum = vfmaq_f32(sum, pairs.of[2 * part], vld1q_f32(x.sums + 8 * part));
        *sums = vfmaq_f32(sum, pairs.of[2 * part + 1], vld1q_f32(x.sums + 8 * part + 4));
      } else {
        *sums = vaddq_f32(sum, vuzp2q_f32(a, b));
      }
    }
  }
};

template <class Products>
struct Ggml<GgmlTQ2, Products> : GgmlTQ2 {
  using Sums = float32x4_t;
  struct Step {
    float d;
    uint8x16_t halves[4];

    explicit Step(const char* p)
        : d(half(p + 64)), halves{load_bytes(p), load_bytes(p + 16), load_bytes(p + 32), load_bytes(p + 48)} {}
  };

  static Sums zero_sums() { return vdupq_n_f32(0); }
  static float total(Sums sums) { return vaddvq_f32(sums); }

  static int8x16_t bits(uint8x16_t v, int s) {
    return vreinterpretq_s8_u8(
        vandq_u8(s < 3 ? v : vshrq_n_u8(v, 2), vdupq_n_u8(static_cast<std::uint8_t>(3 * tq2_times(s)))));
  }

  static void add_step(Sums* sums, const Step& step, const GgmlInput& x) {
    const float32x4_t by[4] = {vld1q_f32(x.pairs), vld1q_f32(x.pairs + 4), vld1q_f32(x.pairs + 8),
                               vld1q_f32(x.pairs + 12)};
    float32x4_t sum = vaddq_f32(vuzp2q_f32(by[0], by[1]), vuzp2q_f32(by[2], by[3]));
    for (int part = 0; part < 2; ++part)
      for (int s = 0; s < 4; ++s) {
        const std::int8_t* values = x.values + 64 * s + 32 * part;
        const Group w{bits(step.halves[2 * part], s), bits(step.halves[2 * part + 1], s)};
        const Group v{vld1q_s8(values), vld1q_s8(values + 16)};
        sum = vfmaq_n_f32(sum, vcvtq_f32_s32(Products::sum(w, v)), x.pairs[8 * part + 2 * s]);
      }
    *sums = vfmaq_n_f32(*sums, sum, step.d);
  }
};

}  // namespace
}  // namespace pi2::neon
