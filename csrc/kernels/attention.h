// The attention kernel (attend), shared by all instruction sets. `Format` as in kernels/plain.h; its instruction set
// also provides mul, max, reduce_max, reduce4 (four vectors to four sums, each in the same order), shift_exponent (p *
// 2^n, n in the lowest bits of t) and zero_below.
//
// The result of a row depends on its own query and mask alone: rows share loads, never sums.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/fetch_rows.h"
#include "pi2/kernels.h"

namespace pi2 {

constexpr std::int64_t kAttendTile = 4;           // positions whose scores are computed and stored together
constexpr std::int64_t kAttendAheadBytes = 8192;  // prefetch distance of keys and of values

// e^x for x <= 0, to about 1 ulp; 0 below -86, where it is negligible beside the largest weight, 1; NaN stays NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2, and e^r by its series to r^7.
template <class Simd>
inline typename Simd::Float exp_of(typename Simd::Float x) {
  using Float = typename Simd::Float;
  const Float t = Simd::fma(x, Simd::set1(1.44269504f), Simd::set1(12582912.0f));  // adding 1.5 * 2^23 rounds to n
  const Float n = Simd::add(t, Simd::set1(-12582912.0f));
  Float r = Simd::fma(n, Simd::set1(-0.693359375f), x);
  r = Simd::fma(n, Simd::set1(2.12194440e-4f), r);
  constexpr float kFactors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  Float p = Simd::set1(1.0f / 5040);
  for (const float factor : kFactors) p = Simd::fma(p, r, Simd::set1(factor));
  p = Simd::fma(x, Simd::zero(), Simd::shift_exponent(p, t));  // shifted, the bits of a NaN may be those of a number
  return Simd::zero_below(x, Simd::set1(-86.0f), p);
}

// Calls use(kRows, r) for blocks of kRows rows within [r, last), then for half as many rows, down to one.
template <int kRows, class Use>
inline void by_rows(std::int64_t r, std::int64_t last, Use use) {
  for (; r + kRows <= last; r += kRows) use(std::integral_constant<int, kRows>{}, r);
  if constexpr (kRows > 1) by_rows<kRows / 2>(r, last, use);
}

// Prefetches later rows at the pace at which others are read: a burst would stall.
template <class Format>
struct Ahead {
  std::int64_t bytes, stride;
  const char* row;
  std::int64_t at = 0;

  Ahead(const AttendArgs& a, const char* now, std::int64_t stride)
      : bytes(a.width * Format::kBytes), stride(stride), row(now + (kAttendAheadBytes / bytes + 1) * stride) {}
  void next(std::int64_t count) {
    for (std::int64_t i = 0; i < count; i += 64) fetch(row + at + i);
    at += count;
    if (at < bytes) return;
    at = 0;
    row += stride;
  }
};

// out[r * kAttendWord + i] = query r . key i. `fetches`: whether this is the first pass over these keys.
template <class Format, int kRows>
inline void score_tile(const AttendArgs& a, const float* q, const char* const* key, bool fetches, float* out) {
  using Float = typename Format::Float;
  constexpr std::int64_t kLanes = Format::kLanes;
  Float sum[kRows][kAttendTile];
  const auto step = [&](std::int64_t k, auto load) {
    Float w[kAttendTile];
#pragma GCC unroll 4  // or GCC 12 keeps the sums in memory
    for (int i = 0; i < kAttendTile; ++i) w[i] = load(key[i] + k * Format::kBytes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Float x = Format::load_floats(q + r * a.ld + k);
#pragma GCC unroll 4
      for (int i = 0; i < kAttendTile; ++i) sum[r][i] = Format::fma(w[i], x, sum[r][i]);
    }
  };
#pragma GCC unroll 4
  for (auto& row : sum)
#pragma GCC unroll 4
    for (Float& s : row) s = Format::zero();
  Ahead<Format> ahead(a, key[0], a.key_stride);
  const std::int64_t asked = fetches ? kAttendTile * kLanes * Format::kBytes : 0;
  std::int64_t k = 0;
  for (; k + kLanes <= a.width; k += kLanes) {
    ahead.next(asked);
    step(k, [](const char* p) { return Format::load(p); });
  }
  if (k < a.width) step(k, [left = a.width - k](const char* p) { return Format::load(p, left); });
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) Format::reduce4(sum[r][0], sum[r][1], sum[r][2], sum[r][3], out + r * kAttendWord);
}

// Scores of the positions [first, end) of a word whose keys begin at `key`.
template <class Format, int kRows>
inline void score_word(const AttendArgs& a, const char* key, std::int64_t first, std::int64_t end) {
  for (std::int64_t p = first; p < end; p += kAttendTile) {
    const char* keys[kAttendTile];
    for (std::int64_t i = 0; i < kAttendTile; ++i)
      keys[i] = key + (p + i < end ? p + i : end - 1) * a.key_stride;  // beyond may be unmapped
    by_rows<kRows>(0, a.tokens * a.group, [&](auto count, std::int64_t r) {
      score_tile<Format, count>(a, a.q + r * a.ld, keys, r == 0, a.scores + r * kAttendWord + p);
    });
  }
}

// int8 rows end with their scale.
template <class Format>
constexpr bool kScaled = Format::kBytes == 1;

// The scales of a word's rows; zeros for rows that are not read.
struct WordScales {
  float key[kAttendWord] = {}, value[kAttendWord] = {};

  void read(const AttendArgs& a, std::int64_t word, std::int64_t first, std::int64_t end) {
    for (std::int64_t i = 0; i < kAttendWord; ++i) {
      if (i < first || i >= end) {
        key[i] = value[i] = 0;
        continue;
      }
      const std::int64_t position = word * kAttendWord + i;
      std::memcpy(&key[i], a.key + position * a.key_stride + a.width, sizeof(float));
      std::memcpy(&value[i], a.value + position * a.value_stride + a.width, sizeof(float));
    }
  }
};

// Turns the scores of row r in a word into weights, and scales what the row has so far to the new maximum. Weights are
// then multiplied by the scale of their value.
template <class Format>
inline void soften(const AttendArgs& a, std::int64_t r, std::uint64_t mask, const WordScales& scales) {
  using Float = typename Format::Float;
  constexpr std::int64_t kLanes = Format::kLanes;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  float* s = a.scores + r * kAttendWord;
  for (std::int64_t i = 0; i < kAttendWord; i += kLanes) {
    Float score = Format::mul(Format::load_floats(s + i), Format::set1(a.scale));
    if constexpr (kScaled<Format>) score = Format::mul(score, Format::load_floats(scales.key + i));
    Format::store_floats(s + i, score);
  }
  if (a.softcap != 0)
    for (std::int64_t i = 0; i < kAttendWord; ++i)
      if ((mask >> i & 1) != 0) s[i] = a.softcap * std::tanh(s[i] / a.softcap);
  if (~mask != 0)  // also of positions whose scores were not computed
    for (std::int64_t i = 0; i < kAttendWord; ++i) s[i] = (mask >> i & 1) != 0 ? s[i] : kNone;
  Float top = Format::set1(a.max[r]);
  for (std::int64_t i = 0; i < kAttendWord; i += kLanes) top = Format::max(top, Format::load_floats(s + i));
  const float highest = Format::reduce_max(top), base = highest == kNone ? 0.0f : highest;
  Float total = Format::zero();
  for (std::int64_t i = 0; i < kAttendWord; i += kLanes) {
    const Float e = exp_of<Format>(Format::add(Format::load_floats(s + i), Format::set1(-base)));
    total = Format::add(total, e);
    if constexpr (kScaled<Format>)
      Format::store_floats(s + i, Format::mul(e, Format::load_floats(scales.value + i)));
    else
      Format::store_floats(s + i, e);
  }
  float before;
  Format::store_floats(&before, exp_of<Format>(Format::set1(a.max[r] - base)), 1);
  a.max[r] = highest;
  a.sum[r] = a.sum[r] * before + Format::reduce(total);
  if (before == 1.0f) return;
  for (std::int64_t k = 0; k < a.ld; k += kLanes)
    Format::store_floats(a.y + r * a.ld + k,
                         Format::mul(Format::load_floats(a.y + r * a.ld + k), Format::set1(before)));
}

// y[r] += weight of position i * its value, i in order, for kVectors vectors of columns from k on. `fetches`: whether
// these are the first rows that these values go into.
template <class Format, int kRows, int kVectors, class Load>
inline void weigh_tile(const AttendArgs& a, std::int64_t row, std::int64_t k, const char* value, std::int64_t first,
                       std::int64_t end, bool fetches, Load load) {
  using Float = typename Format::Float;
  constexpr std::int64_t kLanes = Format::kLanes;
  Float sum[kRows][kVectors];
  const float* weight = a.scores + row * kAttendWord;
  float* y = a.y + row * a.ld + k;
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sum[r][v] = Format::load_floats(y + r * a.ld + v * kLanes);
  Ahead<Format> ahead(a, value + first * a.value_stride, a.value_stride);
  const std::int64_t step = fetches && k == 0 ? ahead.bytes : 0;
  for (std::int64_t i = first; i < end; ++i) {
    const char* row_V = value + i * a.value_stride;
    ahead.next(step);
    Float w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = load(row_V + (k + v * kLanes) * Format::kBytes);
    for (int r = 0; r < kRows; ++r) {
      const Float factor = Format::set1(weight[r * kAttendWord + i]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Format::fma(factor, w[v], sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) Format::store_floats(y + r * a.ld + v * kLanes, sum[r][v]);
}

template <class Format, int kRows>
inline void weigh_rows(const AttendArgs& a, std::int64_t row, const char* value, std::int64_t first, std::int64_t end,
                       bool fetches) {
  constexpr std::int64_t kLanes = Format::kLanes;
  const auto whole = [](const char* p) { return Format::load(p); };
  std::int64_t k = 0;
  for (; k + 4 * kLanes <= a.width; k += 4 * kLanes)
    weigh_tile<Format, kRows, 4>(a, row, k, value, first, end, fetches, whole);
  for (; k + kLanes <= a.width; k += kLanes) weigh_tile<Format, kRows, 1>(a, row, k, value, first, end, fetches, whole);
  if (k < a.width)
    weigh_tile<Format, kRows, 1>(a, row, k, value, first, end, fetches,
                                 [left = a.width - k](const char* p) { return Format::load(p, left); });
}

// Adds the values of a word to the rows whose tokens see them. A value that a token does not see may be NaN, so it is
// not even multiplied by zero.
template <class Format, int kRows>
inline void weigh_word(const AttendArgs& a, const char* value, std::int64_t word, std::int64_t first,
                       std::int64_t end) {
  const auto sees = [&](std::int64_t t, std::int64_t i) { return (a.mask[t * a.words + word] >> i & 1) != 0; };
  std::uint64_t changes = 0;  // positions where visibility differs from the position before
  for (std::int64_t t = 0; t < a.tokens; ++t) changes |= a.mask[t * a.words + word] ^ (a.mask[t * a.words + word] << 1);
  for (std::int64_t i = first, next; i < end; i = next) {
    for (next = i + 1; next < end && (changes >> next & 1) == 0;) ++next;
    for (std::int64_t t = 0, stop; t < a.tokens; t = stop) {
      for (stop = t + 1; stop < a.tokens && sees(stop, i) == sees(t, i);) ++stop;
      if (!sees(t, i)) continue;
      by_rows<kRows>(t * a.group, stop * a.group, [&](auto count, std::int64_t r) {
        weigh_rows<Format, count>(a, r, value, i, next, r == t * a.group);
      });
    }
  }
}

// kRows: rows whose sums fit the registers, with four positions or four vectors of columns.
template <class Format, int kRows>
inline void attend(const AttendArgs& a) {
  WordScales scales;
  for (std::int64_t word = a.begin; word < a.end; ++word) {
    std::uint64_t any = 0;
    for (std::int64_t t = 0; t < a.tokens; ++t) any |= a.mask[t * a.words + word];
    if (any == 0) continue;
    const std::int64_t first = __builtin_ctzll(any), end = kAttendWord - __builtin_clzll(any);
    score_word<Format, kRows>(a, a.key + word * kAttendWord * a.key_stride, first / kAttendTile * kAttendTile, end);
    if constexpr (kScaled<Format>) scales.read(a, word, first, end);
    for (std::int64_t r = 0; r < a.tokens * a.group; ++r) {
      const std::uint64_t mask = a.mask[r / a.group * a.words + word];
      if (mask != 0) soften<Format>(a, r, mask, scales);
    }
    weigh_word<Format, kRows>(a, a.value + word * kAttendWord * a.value_stride, word, first, end);
  }
}

// A group of kQ4 as floats.
template <class Format>
struct PlainGroup {
  static void unpack(const char* values, float scale, float* out) {
    for (int i = 0; i < kGroup / 2; ++i) {
      const auto both = static_cast<std::uint8_t>(values[i]);
      out[i] = static_cast<float>((both & 15) - 8) * scale;
      out[i + kGroup / 2] = static_cast<float>((both >> 4) - 8) * scale;
    }
  }
};

// A row of kQ4 as floats, with what pads its last group.
template <class Format, class Group>
inline void unpack_q4(const char* row, std::int64_t width, float* out) {
  const char* scales = row + groups(width) * (kGroup / 2);
  for (std::int64_t g = 0; g < groups(width); ++g)
    Group::unpack(row + g * (kGroup / 2), Format::half(scales + 2 * g), out + g * kGroup);
}

// The same over rows of kQ4: those of a word become floats, which all queries then share. `Format`: that of floats.
template <class Format, int kRows, class Group = PlainGroup<Format>>
inline void attend_q4(const AttendArgs& a) {
  const WordScales none;
  const std::int64_t ld = groups(a.width) * kGroup;
  AttendArgs of_floats = a;
  of_floats.key_stride = of_floats.value_stride = ld * Format::kBytes;
  const auto* rows = reinterpret_cast<const char*>(a.unpacked);
  for (std::int64_t word = a.begin; word < a.end; ++word) {
    std::uint64_t any = 0;
    for (std::int64_t t = 0; t < a.tokens; ++t) any |= a.mask[t * a.words + word];
    if (any == 0) continue;
    const std::int64_t first = __builtin_ctzll(any) / kAttendTile * kAttendTile;
    const std::int64_t end = kAttendWord - __builtin_clzll(any);
    const auto unpack = [&](const char* from, std::int64_t stride) {
      from += (word * kAttendWord + first) * stride;
      for (std::int64_t i = first; i < end; ++i, from += stride) {
        fetch(from + kAttendAheadBytes / 4);
        unpack_q4<Format, Group>(from, a.width, a.unpacked + i * ld);
      }
    };
    unpack(a.key, a.key_stride);
    score_word<Format, kRows>(of_floats, rows, first, end);
    for (std::int64_t r = 0; r < a.tokens * a.group; ++r) {
      const std::uint64_t mask = a.mask[r / a.group * a.words + word];
      if (mask != 0) soften<Format>(a, r, mask, none);
    }
    unpack(a.value, a.value_stride);
    weigh_word<Format, kRows>(of_floats, rows, word, __builtin_ctzll(any), end);
  }
}

}  // namespace pi2
