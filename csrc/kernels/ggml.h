// Rows in ggml's blocks (types.h), once for all vector instruction sets. kernels/scalar/ggml.h says what blocks mean:
// a weight is scale * q + offset, q an unsigned integer of 4 to 6 bits, with a scale and an offset for each group of
// 32, or (q6_k) for each of its halves.
//
// A step is what is taken of a row at a time: a superblock of eight groups, or four blocks of a group each. It has
// parts of four groups: 16 numbers of each, their first halves, then as many, their second halves. `Format` is a
// dtype on an instruction set:
//   kDType, kHalves           whether halves of groups have scales of their own
//   Scales, scales(p)         of the step at p: scale and offset of each group or half, in order
//   store(Scales, s, o)       the same as floats, 16 of each at most
//   Numbers, numbers(p, part) unsigned bytes
//   store(Numbers, bytes)     the same as 128 bytes
// For float activations it has by inheritance what plain.h wants and bytes(p) (kLanes unsigned bytes as floats); for
// int8 ones Sums (of a row and a token), zero_sums(), total(Sums) and
//   add_offsets(sums, scales, x)     offsets times the sums of x
//   add_products(sums, scales, part, numbers, x)   scales times the products with the values of x, every group's an
//   exact integer
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/fetch_rows.h"
#include "kernels/over_tokens.h"
#include "pi2/kernels.h"

// Unnamed: functions that are compiled with other flags elsewhere must stay apart (the linker would keep one of them).
namespace pi2 {
namespace {

constexpr std::int64_t kGgmlPart = 4 * kGroup;

// An input rounded to int8, the same for every instruction set: for every four groups 64 bytes of first halves and 64
// of second ones, padded(n) in all; then a scale for each group, and that times the sum of its values. With halves both
// are there for each half.
template <bool kHalves>
struct GgmlInput {
  static constexpr std::int64_t kScales = kHalves ? 2 : 1;  // of a group
  const std::int8_t* values;
  const float* scale;
  const float* sum;

  GgmlInput(const void* x, std::int64_t n)
      : values(static_cast<const std::int8_t*>(x)),
        scale(reinterpret_cast<const float*>(values + padded(n))),
        sum(scale + kScales * (padded(n) / kGroup)) {}

  // From group g on.
  GgmlInput from(std::int64_t g) const {
    GgmlInput later = *this;
    later.values += g * kGroup;
    later.scale += kScales * g;
    later.sum += kScales * g;
    return later;
  }
};

// quantize_group(x, count, out) rounds `count` numbers as scalar::quantize_group does.
template <auto quantize_group, bool kHalves>
void ggml_prepare_a8(PI2_PREPARE_ARGS) {
  auto* values = static_cast<std::int8_t*>(out);
  const std::int64_t all = padded(n) / kGroup;
  auto* scales = reinterpret_cast<float*>(values + padded(n));
  float* sums = scales + GgmlInput<kHalves>::kScales * all;
  for (std::int64_t g = 0; g < all; ++g) {
    std::int8_t group[kGroup] = {};
    const float scale = g * kGroup < n ? quantize_group(x + g * kGroup, kGroup, group) : 0.0f;
    std::int8_t* to = values + g / 4 * kGgmlPart + g % 4 * (kGroup / 2);
    std::memcpy(to, group, kGroup / 2);
    std::memcpy(to + kGgmlPart / 2, group + kGroup / 2, kGroup / 2);
    std::int32_t sum[2] = {};
    for (std::int64_t k = 0; k < kGroup; ++k) sum[k / (kGroup / 2)] += group[k];
    if constexpr (kHalves) {
      for (int h = 0; h < 2; ++h) {
        *scales++ = scale;
        *sums++ = scale * static_cast<float>(sum[h]);
      }
    } else {
      *scales++ = scale;
      *sums++ = scale * static_cast<float>(sum[0] + sum[1]);
    }
  }
}

// The 6-bit scales and mins of a superblock of q4_k or q5_k, a byte each: 8 and 8, packed into 12 bytes at p.
struct KScales {
  std::uint64_t scale, min;

  explicit KScales(const char* p) {
    std::uint32_t a, b, c;  // low bits of four scales, of four mins, and of the other four of both
    std::memcpy(&a, p, sizeof(a));
    std::memcpy(&b, p + 4, sizeof(b));
    std::memcpy(&c, p + 8, sizeof(c));
    scale = (a & 0x3f3f3f3fu) | std::uint64_t{(c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u)} << 32;
    min = (b & 0x3f3f3f3fu) | std::uint64_t{(c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u)} << 32;
  }
};

template <class Format>
struct GgmlRows {
  static constexpr GgmlBlock kBlock = ggml_block(Format::kDType);
  static constexpr std::int64_t kStep = kBlock.numbers == kGroup ? kGgmlPart : kBlock.numbers;
  static constexpr std::int64_t kStepBytes = kStep / kBlock.numbers * kBlock.bytes;
  static constexpr std::int64_t kParts = kStep / kGgmlPart;

  static std::int64_t steps(std::int64_t n) { return (n + kStep - 1) / kStep; }

  // A row's steps. Of the last one there may be only some blocks: then it is a copy, in which the others are zero.
  struct Row {
    const char* at;
    char last[kStepBytes];

    // The step that begins with `left` numbers to go.
    const char* step(std::int64_t left) {
      const char* now = at;
      at += kStepBytes;
      if (kParts > 1 || left >= kStep) return now;
      std::memset(last, 0, sizeof(last));
      std::memcpy(last, now, static_cast<std::size_t>(row_bytes(Format::kDType, left)));
      return last;
    }
  };

  // Weights are floats first, as ggml's own conversion has them; a sum for first halves and one for second ones.
  template <int kRows, int kTokens>
  static void dot_tile(const void* const* rows, const void* const* x_T, std::int64_t n, float* out, std::int64_t ldo,
                       const void* const* next, std::int64_t pace) {
    using Float = typename Format::Float;
    constexpr std::int64_t kLanes = Format::kLanes, kHalf = kGroup / 2;
    NextRows<Format, kRows> ahead{next, pace};
    Row row[kRows];
    Float acc[kRows][kTokens][2];
    for (int r = 0; r < kRows; ++r) {
      row[r].at = row_at(rows, r);
      for (int t = 0; t < kTokens; ++t) acc[r][t][0] = acc[r][t][1] = Format::zero();
    }
    for (std::int64_t k = 0; k < n; k += kStep) {
      ahead.step();
      const char* p[kRows];
      alignas(64) float scale[kRows][16], offset[kRows][16];
      for (int r = 0; r < kRows; ++r) {
        p[r] = row[r].step(n - k);
        Format::store(Format::scales(p[r]), scale[r], offset[r]);
      }
      for (std::int64_t part = 0; part < kParts; ++part) {
        alignas(64) char numbers[kRows][kGgmlPart];
        for (int r = 0; r < kRows; ++r) Format::store(Format::numbers(p[r], part), numbers[r]);
        for (std::int64_t i = 0; i < 8; ++i) {  // half i % 2 of group i / 2
          const std::int64_t g = 4 * part + i / 2, s = Format::kHalves ? 2 * g + i % 2 : g;
          for (std::int64_t v = 0; v < kHalf; v += kLanes) {
            Float w[kRows];
            for (int r = 0; r < kRows; ++r)
              w[r] = Format::fma(Format::bytes(numbers[r] + i % 2 * (kGgmlPart / 2) + i / 2 * kHalf + v),
                                 Format::set1(scale[r][s]), Format::set1(offset[r][s]));
            for (int t = 0; t < kTokens; ++t) {
              const Float x =
                  Format::load_floats(static_cast<const float*>(x_T[t]) + k + part * kGgmlPart + i * kHalf + v);
              for (int r = 0; r < kRows; ++r) acc[r][t][i % 2] = Format::fma(w[r], x, acc[r][t][i % 2]);
            }
          }
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < kTokens; ++t) out[r * ldo + t] = Format::reduce(Format::add(acc[r][t][0], acc[r][t][1]));
  }

  static void dot(PI2_DOT_ARGS) {
    return over_rows<over_tokens<4, dot_tile<1, 4>, dot_tile<1, 1>>, over_tokens<2, dot_tile<2, 2>, dot_tile<2, 1>>>(
        rows, count, x_T, tokens, n, out_RT, next, row_bytes(Format::kDType, n), steps(n));
  }

  template <int kRows, int kTokens>
  static void dot_a8_tile(const void* const* rows, const void* const* x_T, std::int64_t n, float* out, std::int64_t ldo,
                          const void* const* next, std::int64_t pace) {
    using Input = GgmlInput<Format::kHalves>;
    NextRows<Format, kRows> ahead{next, pace};
    Row row[kRows];
    typename Format::Sums sums[kRows][kTokens];
    for (int r = 0; r < kRows; ++r) {
      row[r].at = row_at(rows, r);
      for (int t = 0; t < kTokens; ++t) sums[r][t] = Format::zero_sums();
    }
    for (std::int64_t k = 0; k < n; k += kStep) {
      ahead.step();
      const char* p[kRows];
      typename Format::Scales scales[kRows];
      for (int r = 0; r < kRows; ++r) {
        p[r] = row[r].step(n - k);
        scales[r] = Format::scales(p[r]);
      }
      for (int t = 0; t < kTokens; ++t) {
        const Input x = Input(x_T[t], n).from(k / kGroup);
        for (int r = 0; r < kRows; ++r) Format::add_offsets(&sums[r][t], scales[r], x);
      }
      for (std::int64_t part = 0; part < kParts; ++part) {
        typename Format::Numbers numbers[kRows];
        for (int r = 0; r < kRows; ++r) numbers[r] = Format::numbers(p[r], part);
        for (int t = 0; t < kTokens; ++t) {
          const Input x = Input(x_T[t], n).from(k / kGroup);
          for (int r = 0; r < kRows; ++r) Format::add_products(&sums[r][t], scales[r], part, numbers[r], x);
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < kTokens; ++t) out[r * ldo + t] = Format::total(sums[r][t]);
  }

  static void dot_a8(PI2_DOT_ARGS) {
    return over_rows<over_tokens<4, dot_a8_tile<1, 4>, dot_a8_tile<1, 1>>,
                     over_tokens<2, dot_a8_tile<2, 2>, dot_a8_tile<2, 1>>>(rows, count, x_T, tokens, n, out_RT, next,
                                                                           row_bytes(Format::kDType, n), steps(n));
  }
};

}  // namespace
}  // namespace pi2
