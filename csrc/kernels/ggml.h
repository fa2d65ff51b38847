// Rows in ggml's blocks (types.h), shared by all vector instruction sets. kernels/scalar/ggml.h describes the blocks.
// Here a number is unsigned, of 2 to 6 bits, and every group of 32 has a pair of floats: a scale, and an addend that is
// multiplied by ggml_offset(); or (with halves) a scale for each half, which is also the addend.
//
// A step is the part of a row that is processed at a time: a superblock of eight groups, or four blocks of one group
// each. It consists of parts of four groups: the first halves of each, 16 numbers, then the second halves. `Format` is
// a dtype on an instruction set:
//   kDType
//   Pairs, pairs(p)           of the groups of the step at p
//   store(Pairs, floats)      16 at most
//   Numbers, numbers(p, part) unsigned bytes
//   store(Numbers, bytes)     128
// For float activations it inherits the members that plain.h needs and bytes(p) (kLanes unsigned bytes as floats); for
// int8 ones Sums (of a row and a token), zero_sums(), total(Sums), Step(p) and add_step(sums, step, x): every group's
// products as an exact integer.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/fetch_rows.h"
#include "kernels/over_tokens.h"
#include "pi2/kernels.h"

// Unnamed: the same functions are compiled with other flags elsewhere, and the linker would keep only one of them.
namespace pi2 {
namespace {

constexpr std::int64_t kGgmlPart = 4 * kGroup;

constexpr bool has_halves(DType dtype) { return dtype == DType::kQ6K; }
constexpr float ggml_offset(DType dtype) {
  return dtype == DType::kQ5_0                            ? -16
         : dtype == DType::kQ6K                           ? -32
         : dtype == DType::kQ4_1 || dtype == DType::kQ5_1 ? 1
                                                          : -1;
}

// Where the first half of group g begins in an input, and the second one from there. Of tq2_0, 64 bytes have 32 of both
// groups that are the same bits of a superblock.
constexpr std::int64_t ggml_place(DType dtype, std::int64_t g) {
  return dtype == DType::kTQ2 ? g / 8 * 256 + g % 4 * 64 + g / 4 % 2 * 32 : g / 4 * kGgmlPart + g % 4 * (kGroup / 2);
}
constexpr std::int64_t ggml_second_half(DType dtype) { return dtype == DType::kTQ2 ? kGroup / 2 : kGgmlPart / 2; }
// Numbers of tq2_0 are multiplied where their bits lie (those of the last groups two bits lower), so many times too
// large, and scales of inputs are so many times too small. Powers of two are exact.
constexpr int tq2_times(std::int64_t g) { return g % 4 == 0 ? 1 : g % 4 == 1 ? 4 : 16; }

// An input rounded to int8, the same for every instruction set: for every four groups 64 bytes of first halves and 64
// of second ones (but see ggml_place), padded(n) in all; then two floats for each group: its scale, and that times the
// sum of its values times ggml_offset(). With halves twice the scale, and behind all of these such sums of both halves.
struct GgmlInput {
  const std::int8_t* values;
  const float* pairs;
  const float* sums;  // with halves

  // From group g on.
  GgmlInput(const void* x, std::int64_t n, std::int64_t g)
      : values(static_cast<const std::int8_t*>(x) + g * kGroup),
        pairs(reinterpret_cast<const float*>(static_cast<const std::int8_t*>(x) + padded(n)) + 2 * g),
        sums(pairs + 2 * (padded(n) / kGroup)) {}
};

// quantize_group(x, count, out) rounds `count` numbers as scalar::quantize_group does.
template <auto quantize_group, DType kDType>
void ggml_prepare_a8(PI2_PREPARE_ARGS) {
  auto* values = static_cast<std::int8_t*>(out);
  auto* pairs = reinterpret_cast<float*>(values + padded(n));
  const std::int64_t all = padded(n) / kGroup;
  for (std::int64_t g = 0; g < all; ++g, pairs += 2) {
    std::int8_t group[kGroup] = {};
    const float scale = g * kGroup < n ? quantize_group(x + g * kGroup, kGroup, group) : 0.0f;
    std::int8_t* to = values + ggml_place(kDType, g);
    std::memcpy(to, group, kGroup / 2);
    std::memcpy(to + ggml_second_half(kDType), group + kGroup / 2, kGroup / 2);
    std::int32_t sum[2] = {};
    for (std::int64_t k = 0; k < kGroup; ++k) sum[k / (kGroup / 2)] += group[k];
    const float by = ggml_offset(kDType) * scale;
    pairs[0] = kDType == DType::kTQ2 ? scale / static_cast<float>(tq2_times(g)) : scale;
    pairs[1] = has_halves(kDType) ? scale : by * static_cast<float>(sum[0] + sum[1]);
    for (int h = 0; has_halves(kDType) && h < 2; ++h) pairs[2 * all + h] = by * static_cast<float>(sum[h]);
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

// What add_step takes of a row.
template <class Format>
struct GgmlStep {
  static constexpr std::int64_t kParts = ggml_block(Format::kDType).numbers == kGroup ? 1 : 2;
  typename Format::Pairs pairs;
  typename Format::Numbers numbers[kParts];

  explicit GgmlStep(const char* p) : pairs(Format::pairs(p)) {
    for (std::int64_t part = 0; part < kParts; ++part) numbers[part] = Format::numbers(p, part);
  }
};

template <class Format>
struct GgmlRows {
  static constexpr DType kDType = Format::kDType;
  static constexpr GgmlBlock kBlock = ggml_block(kDType);
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
      std::memcpy(last, now, static_cast<std::size_t>(row_bytes(kDType, left)));
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
      alignas(64) float pairs[kRows][16], offsets[kRows][16];
      for (int r = 0; r < kRows; ++r) {
        p[r] = row[r].step(n - k);
        Format::store(Format::pairs(p[r]), pairs[r]);
        for (std::int64_t v = 0; v < 8 * kParts; v += kLanes)
          Format::store_floats(offsets[r] + v,
                               Format::mul(Format::set1(ggml_offset(kDType)), Format::load_floats(pairs[r] + v)));
      }
      for (std::int64_t part = 0; part < kParts; ++part) {
        alignas(64) char numbers[kRows][kGgmlPart];
        for (int r = 0; r < kRows; ++r) Format::store(Format::numbers(p[r], part), numbers[r]);
        // Through memory: numbers are widened and scales spread as they are loaded, not with shuffles.
        __asm__("" : "+m"(pairs), "+m"(offsets), "+m"(numbers));
        for (std::int64_t i = 0; i < 8; ++i) {  // half i % 2 of group i / 2
          Float scale[kRows], offset[kRows];
          for (int r = 0; r < kRows; ++r) {
            const std::int64_t pair = 8 * part + i / 2 * 2, at = has_halves(kDType) ? i % 2 : 0;
            scale[r] = Format::set1(pairs[r][pair + at]);
            offset[r] = Format::set1(offsets[r][pair + (has_halves(kDType) ? at : 1)]);
          }
          for (std::int64_t v = 0; v < kHalf; v += kLanes) {
            Float w[kRows];
            for (int r = 0; r < kRows; ++r)
              w[r] = Format::fma(Format::bytes(numbers[r] + i % 2 * (kGgmlPart / 2) + i / 2 * kHalf + v), scale[r],
                                 offset[r]);
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
        rows, count, x_T, tokens, n, out_RT, next, row_bytes(kDType, n), steps(n));
  }

  template <int kRows, int kTokens>
  static void dot_a8_tile(const void* const* rows, const void* const* x_T, std::int64_t n, float* out, std::int64_t ldo,
                          const void* const* next, std::int64_t pace) {
    NextRows<Format, kRows> ahead{next, pace};
    Row row[kRows];
    typename Format::Sums sums[kRows][kTokens];
    for (int r = 0; r < kRows; ++r) {
      row[r].at = row_at(rows, r);
      for (int t = 0; t < kTokens; ++t) sums[r][t] = Format::zero_sums();
    }
    for (std::int64_t k = 0; k < n; k += kStep) {
      ahead.step();
      for (int r = 0; r < kRows; ++r) {
        const typename Format::Step step(row[r].step(n - k));
        for (int t = 0; t < kTokens; ++t) Format::add_step(&sums[r][t], step, GgmlInput(x_T[t], n, k / kGroup));
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < kTokens; ++t) out[r * ldo + t] = Format::total(sums[r][t]);
  }

  static void dot_a8(PI2_DOT_ARGS) {
    return over_rows<over_tokens<4, dot_a8_tile<1, 4>, dot_a8_tile<1, 1>>,
                     over_tokens<2, dot_a8_tile<2, 2>, dot_a8_tile<2, 1>>,
                     over_tokens<2, dot_a8_tile<4, 2>, dot_a8_tile<4, 1>>>(rows, count, x_T, tokens, n, out_RT, next,
                                                                           row_bytes(kDType, n), steps(n));
  }
};

// Rows of tq2_0 added to y, which is in plain order. Besides the members for plain.h, `Simd` has half(p), Fields,
// fields(p) (kLanes bytes, a lane each) and ternary<s>(fields): the two bits 2 s of each lane, less 1, in float.
template <class Simd>
struct TernaryRows {
  using Float = typename Simd::Float;
  static constexpr GgmlBlock kBlock = ggml_block(DType::kTQ2);

  template <int kRows>
  struct Some {
    Float scale[kRows];
    typename Simd::Fields fields[kRows];

    template <int kS>
    void add(float* y) const {
      Float sum = Simd::load_floats(y + kS * kGroup);
      for (int r = 0; r < kRows; ++r) sum = Simd::fma(scale[r], Simd::template ternary<kS>(fields[r]), sum);
      Simd::store_floats(y + kS * kGroup, sum);
    }
  };

  template <int kRows>
  static void axpy_rows(float* y, const void* const* rows, const float* h, std::int64_t n, const void* const* next) {
    NextRows<Simd, kRows> ahead{next, next == nullptr ? 0 : kBlock.bytes};
    Some<kRows> some;
    for (std::int64_t at = 0; at < row_bytes(DType::kTQ2, n); at += kBlock.bytes, y += kBlock.numbers) {
      ahead.step();
      for (int r = 0; r < kRows; ++r)
        some.scale[r] = Simd::set1(h[r] * Simd::half(static_cast<const char*>(rows[r]) + at + 64));
      for (std::int64_t part = 0; part < 2; ++part)
        for (std::int64_t v = 0; v < kGroup; v += Simd::kLanes) {
          for (int r = 0; r < kRows; ++r)
            some.fields[r] = Simd::fields(static_cast<const char*>(rows[r]) + at + part * kGroup + v);
          float* to = y + part * kGgmlPart + v;
          some.template add<0>(to);
          some.template add<1>(to);
          some.template add<2>(to);
          some.template add<3>(to);
        }
    }
  }

  static void axpy(PI2_AXPY_ARGS) {
    over_count<axpy_rows<1>, axpy_rows<2>, axpy_rows<3>, axpy_rows<4>>(y, rows, h, count, n, next);
  }
};

}  // namespace
}  // namespace pi2
