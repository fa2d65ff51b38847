// dot and axpy over rows of plain numbers (f32, bf16, f16, i8), shared by all vector instruction sets.
//
// `Format` is a dtype on an instruction set: its kBytes, load(p) of kLanes stored numbers as floats and load(p, left)
// of the first `left` <= kLanes, zeros after them; and, inherited, the operations of the instruction set
// (Float, kLanes, zero, set1, add, fma, reduce, load_floats, store_floats).
#pragma once

#include "kernels/fetch_rows.h"
#include "kernels/over_tokens.h"
#include "pi2/kernels.h"

namespace pi2 {

// Four accumulators per row and token in every tile, so that the order of a sum depends on n alone.
template <class Format, int kRows, int kTokens>
inline void dot_tile(const void* const* rows, const void* const* x_T, std::int64_t n, float* out, std::int64_t ldo,
                     const void* const* next, std::int64_t pace) {
  using Float = typename Format::Float;
  constexpr std::int64_t kLanes = Format::kLanes;
  NextRows<Format, kRows> ahead{next, pace};
  const char* w[kRows];
  const float* x[kTokens];
  for (int t = 0; t < kTokens; ++t) x[t] = static_cast<const float*>(x_T[t]);
  Float acc[kRows][kTokens][4];
  for (int r = 0; r < kRows; ++r) {
    w[r] = row_at(rows, r);
    for (int t = 0; t < kTokens; ++t)
      for (int j = 0; j < 4; ++j) acc[r][t][j] = Format::zero();
  }
  std::int64_t k = 0;
  for (; k + 4 * kLanes <= n; k += 4 * kLanes) {
    ahead.step();
    for (int j = 0; j < 4; ++j) {
      Float v[kRows];
      for (int r = 0; r < kRows; ++r) v[r] = Format::load(w[r] + (k + j * kLanes) * Format::kBytes);
      for (int t = 0; t < kTokens; ++t) {
        const Float xv = Format::load_floats(x[t] + k + j * kLanes);
        for (int r = 0; r < kRows; ++r) acc[r][t][j] = Format::fma(v[r], xv, acc[r][t][j]);
      }
    }
  }
  for (int j = 0; k < n; k += kLanes, ++j) {
    const std::int64_t left = n - k < kLanes ? n - k : kLanes;
    for (int r = 0; r < kRows; ++r) {
      const Float v = Format::load(w[r] + k * Format::kBytes, left);
      for (int t = 0; t < kTokens; ++t)
        acc[r][t][j] = Format::fma(v, Format::load_floats(x[t] + k, left), acc[r][t][j]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t)
      out[r * ldo + t] =
          Format::reduce(Format::add(Format::add(acc[r][t][0], acc[r][t][1]), Format::add(acc[r][t][2], acc[r][t][3])));
}

// kTile1 tokens at a time with one row, kTile2 with two: as many as fit the registers.
template <class Format, int kTile1, int kTile2>
inline void dot_plain(PI2_DOT_ARGS) {
  const std::int64_t steps = n / (4 * Format::kLanes);
  return over_rows<over_tokens<kTile1, dot_tile<Format, 1, kTile1>, dot_tile<Format, 1, 1>>,
                   over_tokens<kTile2, dot_tile<Format, 2, kTile2>, dot_tile<Format, 2, 1>>>(
      rows, count, x_T, tokens, n, out_RT, next, n * Format::kBytes, steps);
}

template <class Format, int kRows>
inline void axpy_rows(float* y, const void* const* rows, const float* h, std::int64_t n, const void* const* next) {
  using Float = typename Format::Float;
  constexpr std::int64_t kLanes = Format::kLanes;
  Float scale[kRows];
  const char* w[kRows];
  for (int r = 0; r < kRows; ++r) {
    scale[r] = Format::set1(h[r]);
    w[r] = row_at(rows, r);
  }
  constexpr std::int64_t kLine = 64 / Format::kBytes;  // numbers in a cache line
  std::int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    if (next != nullptr && k % kLine == 0)
      for (int r = 0; r < kRows; ++r) fetch(static_cast<const char*>(next[r]) + k * Format::kBytes);
    Float sum = Format::load_floats(y + k);
    for (int r = 0; r < kRows; ++r) sum = Format::fma(scale[r], Format::load(w[r] + k * Format::kBytes), sum);
    Format::store_floats(y + k, sum);
  }
  if (k < n) {
    Float sum = Format::load_floats(y + k, n - k);
    for (int r = 0; r < kRows; ++r) sum = Format::fma(scale[r], Format::load(w[r] + k * Format::kBytes, n - k), sum);
    Format::store_floats(y + k, sum, n - k);
  }
}

template <class Format>
inline void axpy_plain(PI2_AXPY_ARGS) {
  over_count<axpy_rows<Format, 1>, axpy_rows<Format, 2>, axpy_rows<Format, 3>, axpy_rows<Format, 4>>(y, rows, h, count,
                                                                                                     n, next);
}

}  // namespace pi2
