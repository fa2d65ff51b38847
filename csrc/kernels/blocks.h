// Rows in blocks (kernels.h) with int8 activations, for vectors shorter than a block. Lanes are rows, so that no sum is
// taken across lanes, and a block is one stream. Every group is summed to an exact integer before it becomes a float.
//
// A prepared x is its int8 values in plain order, then a scale and a start (minus the weights' offset times the sum of
// the group's values) per group. `Format` is a dtype on an instruction set:
//   kBytes             of a group's values
//   kOffset            offset of the weights in group()
//   kTogether          number of vectors of group()
//   group(w, x, k, start, sums)  sums of start[t] and a group of these rows times x[t][k, k + kGroup), for each token
// It inherits what all dtypes of the instruction set share: Float, kLanes, zero, set1, mul, fma, load_floats
// and store_floats as in plain.h, Int (kLanes sums), to_floats(Int), scales(p) (kLanes stored ones as floats) and
// quantize_group (as scalar::prepare_a8 rounds).
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/fetch_rows.h"
#include "pi2/kernels.h"

namespace pi2 {

// A template over Format, so that no two instruction sets share an instance (the linker would keep only one).
template <class Format>
struct Blocks {
  using Float = typename Format::Float;
  using Int = typename Format::Int;
  static constexpr std::int64_t kLanes = Format::kLanes;
  static constexpr int kTogether = Format::kTogether;
  static constexpr int kVectors = static_cast<int>(kPanelRows / kLanes);
  static constexpr std::int64_t kPairBytes = 2 * Format::kBytes + 4 * kPanelRows;  // of two groups and their scales
  static constexpr std::int64_t kMostTokens = 4;                                   // in a tile
  // Groups whose columns stay in the first-level cache while all tokens use them.
  static constexpr std::int64_t kStepGroups = 1024 / kGroup;
  static constexpr std::uintptr_t kAheadBytes = 8192;  // two pages: hardware prefetching stops at page ends

  static void prepare(PI2_PREPARE_ARGS) {
    auto* values = static_cast<std::int8_t*>(out);
    auto* scale = reinterpret_cast<float*>(values + padded(n));
    auto* start = reinterpret_cast<std::int32_t*>(scale + padded(n) / kGroup);
    for (std::int64_t g = 0; g < groups(n); ++g) {
      std::int8_t* to = values + g * kGroup;
      scale[g] = Format::quantize_group(x + g * kGroup, std::min(kGroup, n - g * kGroup), to);
      std::int32_t sum = 0;
      for (std::int64_t k = 0; k < kGroup; ++k) sum += to[k];
      start[g] = -Format::kOffset * sum;
    }
  }

  // Columns of rows of n numbers: the groups [begin, end), an even number, and whether to prefetch what follows.
  struct Part {
    std::int64_t n, begin, end;
    bool fetch;
  };

  // Adds to `out` unless these are the first columns.
  template <int kTokens>
  static void tile(const char* block, const void* const* x_T, const Part& part, float* out, std::int64_t ldo) {
    const std::int8_t* x[kTokens];
    const float* x_scale[kTokens];
    Float sum[kVectors][kTokens];
    for (int t = 0; t < kTokens; ++t) {
      x[t] = static_cast<const std::int8_t*>(x_T[t]);
      x_scale[t] = reinterpret_cast<const float*>(x[t] + padded(part.n));
      for (int v = 0; v < kVectors; ++v)
        sum[v][t] = part.begin == 0 ? Format::zero() : Format::load_floats(out + t * ldo + v * kLanes);
    }
    const std::int64_t starts = padded(part.n) / kGroup;  // behind as many scales
    const char* w = block + part.begin / 2 * kPairBytes;
    for (std::int64_t g = part.begin; g < part.end; g += 2, w += kPairBytes) {
      if (part.fetch) {
        const std::uintptr_t ahead = reinterpret_cast<std::uintptr_t>(w) + kAheadBytes;  // may pass the matrix's end
        for (std::int64_t line = 0; line < kPairBytes; line += 64) fetch(reinterpret_cast<const void*>(ahead + line));
      }
      for (std::int64_t i = 0; i < 2; ++i) {
        std::int32_t start[kTokens];
        for (int t = 0; t < kTokens; ++t) std::memcpy(&start[t], x_scale[t] + starts + g + i, sizeof(start[t]));
        for (int v = 0; v < kVectors; v += kTogether) {
          Int sums[kTogether][kTokens];
          Format::group(w + i * Format::kBytes + 4 * kLanes * v, x, (g + i) * kGroup, start, sums);
          for (int p = 0; p < kTogether; ++p) {
            const Float scale = Format::scales(w + 2 * Format::kBytes + 2 * (i * kPanelRows + (v + p) * kLanes));
            for (int t = 0; t < kTokens; ++t)
              sum[v + p][t] = Format::fma(Format::to_floats(sums[p][t]),
                                          Format::mul(scale, Format::set1(x_scale[t][g + i])), sum[v + p][t]);
          }
        }
      }
    }
    for (int v = 0; v < kVectors; ++v)
      for (int t = 0; t < kTokens; ++t) Format::store_floats(out + t * ldo + v * kLanes, sum[v][t]);
  }

  // One tile of `count` tokens, at most kTokens.
  template <int kTokens>
  static void tile_of(std::int64_t count, const char* block, const void* const* x_T, const Part& part, float* out,
                      std::int64_t ldo) {
    if (count == kTokens) return tile<kTokens>(block, x_T, part, out, ldo);
    if constexpr (kTokens > 1) tile_of<kTokens - 1>(count, block, x_T, part, out, ldo);
  }

  // Tiles of at most kMostTokens tokens, of about equal size.
  static void dot(PI2_DOT_BLOCKS_ARGS) {
    const std::int64_t all = groups(n), step = tokens <= kMostTokens ? all : kStepGroups;
    for (std::int64_t b = 0; b < count; ++b, out += kPanelRows) {
      const char* block = static_cast<const char*>(blocks) + b * (all / 2 * kPairBytes);
      for (std::int64_t g = 0; g < all; g += step) {
        Part part{n, g, std::min(all, g + step), true};
        for (std::int64_t t = 0, some = 0; t < tokens; t += some, part.fetch = false) {
          const std::int64_t tiles = (tokens - t + kMostTokens - 1) / kMostTokens;
          some = (tokens - t + tiles - 1) / tiles;
          tile_of<kMostTokens>(some, block, x_T + t, part, out + t * ldo, ldo);
        }
      }
    }
  }
};

}  // namespace pi2
