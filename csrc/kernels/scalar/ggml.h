// Rows in ggml's blocks, one group of 32 weights at a time: the meaning of the formats (ggml-common.h and the numpy
// code of the package gguf have it, too), and the reference of every other instruction set.
//
// A block of q4_1, q5_0 and q5_1 is one group: binary16 d; binary16 m (not q5_0); the fifth bits of all 32 in 4 bytes
// (not q4_1); 16 bytes of nibbles, number k in the low and number k + 16 in the high half of byte k. A weight is
// d q + m; of q5_0 d (q - 16).
// A superblock of q4_k and q5_k is eight groups: binary16 d and dmin; 12 bytes of 6-bit scales and mins (KScales); of
// q5_k 32 bytes in which bit s of byte k is the fifth bit of number k of group s; 32 bytes of nibbles for every two
// groups, the low halves of the first and the high ones of the second. A weight is (d scale) q - (dmin min).
// A superblock of q6_k is eight groups: 128 bytes of nibbles, 64 of two higher bits each; a signed byte of scale for
// each half of a group; binary16 d. For every four groups of 64 and 32 bytes, the low and high halves of the first 32
// are groups 0 and 2, those of the others 1 and 3; bits 2 s and 2 s + 1 of the 32 are group s's. A weight is
// (d scale) (q - 32).
// A superblock of tq2_0 is eight groups: 64 bytes of two bits each; binary16 d. Of every four groups' 32 bytes the bits
// 2 s and 2 s + 1 are group s's. A weight is d (q - 1): ternary, as q is at most 2 in files.
#pragma once

#include "kernels/ggml.h"
#include "kernels/scalar/quantized.h"

namespace pi2::scalar {
namespace {

// Weight k is scale[k / 16] * q[k] + offset[k / 16], rounded once: the product is exact.
struct GgmlGroup {
  int q[kGroup];
  float scale[2], offset[2];

  float weight(std::int64_t k) const { return scale[k / 16] * static_cast<float>(q[k]) + offset[k / 16]; }
};

inline float half_at(const char* p) {
  std::uint16_t half;
  std::memcpy(&half, p, sizeof(half));
  return F16::widen(half);
}

inline int byte_at(const char* p, std::int64_t k) { return static_cast<unsigned char>(p[k]); }

// Group g of a row.
template <DType kDType>
inline GgmlGroup ggml_group(const void* row, std::int64_t g) {
  constexpr GgmlBlock kBlock = ggml_block(kDType);
  const char* p = static_cast<const char*>(row) + g * kGroup / kBlock.numbers * kBlock.bytes;
  GgmlGroup out{};
  float scale = half_at(p), offset = 0;
  if constexpr (kBlock.numbers == kGroup) {
    const bool min = kDType != DType::kQ5_0, fifth = kDType != DType::kQ4_1;
    const char *bits = p + (min ? 4 : 2), *nibbles = bits + (fifth ? 4 : 0);
    offset = min ? half_at(p + 2) : 0.0f;
    for (std::int64_t k = 0; k < kGroup; ++k) {
      out.q[k] = byte_at(nibbles, k % 16) >> (k < 16 ? 0 : 4) & 15;
      if (fifth) out.q[k] |= (byte_at(bits, k / 8) >> k % 8 & 1) << 4;
      if (!min) out.q[k] -= 16;
    }
  } else if constexpr (kDType == DType::kQ6K) {
    const std::int64_t part = g % 8 / 4, s = g % 4;
    const char *nibbles = p + 64 * part + 32 * (s % 2), *bits = p + 128 + 32 * part, *scales = p + 192 + 2 * (g % 8);
    for (std::int64_t k = 0; k < kGroup; ++k)
      out.q[k] = ((byte_at(nibbles, k) >> (s < 2 ? 0 : 4) & 15) | (byte_at(bits, k) >> 2 * s & 3) << 4) - 32;
    for (int h = 0; h < 2; ++h)
      out.scale[h] = half_at(p + 208) * static_cast<float>(static_cast<std::int8_t>(scales[h]));
    return out;
  } else if constexpr (kDType == DType::kTQ2) {
    for (std::int64_t k = 0; k < kGroup; ++k) out.q[k] = (byte_at(p + 32 * (g % 8 / 4), k) >> g % 4 * 2 & 3) - 1;
    scale = half_at(p + 64);
  } else {
    const std::int64_t s = g % 8;
    const bool fifth = kDType == DType::kQ5K;
    const KScales k_scales(p + 4);
    const char* nibbles = p + (fifth ? 48 : 16) + 32 * (s / 2);
    scale *= static_cast<float>(k_scales.scale >> 8 * s & 63);
    offset = -half_at(p + 2) * static_cast<float>(k_scales.min >> 8 * s & 63);
    for (std::int64_t k = 0; k < kGroup; ++k) {
      out.q[k] = byte_at(nibbles, k) >> (s % 2 == 0 ? 0 : 4) & 15;
      if (fifth) out.q[k] |= (byte_at(p + 16, k) >> s & 1) << 4;
    }
  }
  for (int h = 0; h < 2; ++h) {
    out.scale[h] = scale;
    out.offset[h] = offset;
  }
  return out;
}

template <DType kDType>
struct Ggml {
  static void dot(PI2_DOT_ARGS) {
    (void)next;
    for (std::int64_t r = 0; r < count; ++r) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        const float* x = static_cast<const float*>(x_T[t]);
        float total[4] = {0, 0, 0, 0};
        for (std::int64_t g = 0; g < groups(n); ++g) {
          const GgmlGroup group = ggml_group<kDType>(rows[r], g);
          float sum[4] = {0, 0, 0, 0};
          for (std::int64_t k = 0; k < kGroup; ++k) sum[k % 4] += group.weight(k) * x[g * kGroup + k];
          total[g % 4] += (sum[0] + sum[1]) + (sum[2] + sum[3]);
        }
        out_RT[r * tokens + t] = (total[0] + total[1]) + (total[2] + total[3]);
      }
    }
  }

  static void dot_a8(PI2_DOT_ARGS) {
    (void)next;
    for (std::int64_t r = 0; r < count; ++r) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        const GgmlInput x(x_T[t], n, 0);
        float total[4] = {0, 0, 0, 0};
        for (std::int64_t g = 0; g < groups(n); ++g) {
          const GgmlGroup group = ggml_group<kDType>(rows[r], g);
          for (std::int64_t h = 0; h < 2; ++h) {
            const std::int8_t* values = x.values + ggml_place(kDType, g) + h * ggml_second_half(kDType);
            int sum = 0, x_sum = 0;
            for (std::int64_t k = 0; k < kGroup / 2; ++k) {
              sum += group.q[h * (kGroup / 2) + k] * values[k];
              x_sum += values[k];
            }
            const float scale = x.pairs[2 * g] * (kDType == DType::kTQ2 ? static_cast<float>(tq2_times(g)) : 1.0f);
            total[g % 4] += group.scale[h] * scale * static_cast<float>(sum) +
                            group.offset[h] * (scale * static_cast<float>(x_sum));
          }
        }
        out_RT[r * tokens + t] = (total[0] + total[1]) + (total[2] + total[3]);
      }
    }
  }

  static void axpy(PI2_AXPY_ARGS) {
    (void)next;
    for (std::int64_t r = 0; r < count; ++r) {
      for (std::int64_t g = 0; g < groups(n); ++g) {
        const GgmlGroup group = ggml_group<kDType>(rows[r], g);
        const float scale = h[r] * group.scale[0];
        for (std::int64_t k = 0; k < kGroup; ++k) y[g * kGroup + k] += scale * static_cast<float>(group.q[k]);
      }
    }
  }

  static void prepare(PI2_PREPARE_ARGS) { scalar::prepare(x, n, out); }
  static void prepare_a8(PI2_PREPARE_ARGS) { ggml_prepare_a8<quantize_group, kDType>(x, n, out); }
};

}  // namespace
}  // namespace pi2::scalar
