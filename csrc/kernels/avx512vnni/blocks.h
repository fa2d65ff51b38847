// Blocks of 16 rows, a lane each (kernels.h): what gemm.h computes from panels, read from memory as it is stored, for
// few tokens. A block is one stream, so that the processor's own prefetching is enough; inputs are broadcast from the
// first-level cache.
#pragma once

#include "kernels/avx512vnni/gemm.h"

// Unnamed: functions that are compiled with other flags elsewhere must stay apart (the linker would keep one of them).
namespace pi2::avx512vnni {
namespace {

// For each format: bytes of a group's values, and use(s, v) for its steps s: v[p] has the columns 4 s..4 s + 3 of the
// 16 rows of block p, which is `stride` bytes behind the one before it.
struct BlockQ4 {
  static constexpr std::int64_t kBytes = 4 * 64;
  template <int kBlocks, class Use>
  static void steps(const char* w, std::int64_t stride, const Use& use) {
    const __m512i low_half = _mm512_set1_epi8(15);
    for (std::int64_t d = 0; d < 4; ++d) {
      __m512i nibbles[kBlocks], v[kBlocks];
      for (int p = 0; p < kBlocks; ++p) {
        nibbles[p] = _mm512_loadu_si512(w + p * stride + 64 * d);
        v[p] = _mm512_and_si512(nibbles[p], low_half);
      }
      use(d, v);
      for (int p = 0; p < kBlocks; ++p) v[p] = _mm512_and_si512(_mm512_srli_epi16(nibbles[p], 4), low_half);
      use(4 + d, v);
    }
  }
};

struct BlockQ8 {
  static constexpr std::int64_t kBytes = 8 * 64;
  template <int kBlocks, class Use>
  static void steps(const char* w, std::int64_t stride, const Use& use) {
    for (std::int64_t s = 0; s < kStepsOfGroup; ++s) {
      __m512i v[kBlocks];
      for (int p = 0; p < kBlocks; ++p) v[p] = _mm512_loadu_si512(w + p * stride + 64 * s);
      use(s, v);
    }
  }
};

constexpr std::int64_t kStepColumns = 1024;
// Two pages: what the processor prefetches by itself ends with each. It does more for a single stream, which is slower
// if so much is asked for far ahead.
constexpr std::uintptr_t kAheadBytes = 8192, kAheadOfOne = 1536;

inline __m512 block_scales(const char* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Which columns of rows of n: the groups [begin, end), an even number of them, and whether what follows is asked for.
struct Groups {
  std::int64_t n, begin, end;
  bool fetch;
};

// Of all rows; sums go on from what is in `out` unless these are the first columns.
template <class Format, int kBlocks, int kTokens>
inline void dot_blocks_tile(const char* blocks, const void* const* x_T, const Groups& some, float* out,
                            std::int64_t ldo) {
  constexpr std::int64_t kPairBytes = 2 * Format::kBytes + 64;  // of two groups
  const std::int64_t stride = groups(some.n) / 2 * kPairBytes, begin = some.begin;
  const char* w = blocks + begin / 2 * kPairBytes;
  const std::int8_t* x[kTokens];
  const float* x_scale[kTokens];
  const std::int32_t* start[kTokens];
  __m512 sum[kBlocks][kTokens];
  for (int t = 0; t < kTokens; ++t) {
    const GemmInput input(x_T[t], some.n);
    x[t] = input.values;
    x_scale[t] = input.scale;
    start[t] = input.start;
    for (int p = 0; p < kBlocks; ++p)
      sum[p][t] = begin == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(out + t * ldo + p * kPanelRows);
  }
  for (std::int64_t g = begin; g < some.end; g += 2, w += kPairBytes) {
    for (int p = 0; some.fetch && p < kBlocks; ++p) {
      constexpr std::uintptr_t kAhead = kBlocks * kTokens == 1 ? kAheadOfOne : kAheadBytes;
      const auto ahead = reinterpret_cast<std::uintptr_t>(w) + p * stride + kAhead;  // may pass the matrix's end
      for (std::int64_t line = 0; line < kPairBytes; line += 64) fetch(reinterpret_cast<const void*>(ahead + line));
    }
    for (std::int64_t i = 0; i < 2; ++i) {
      __m512i acc[kBlocks][kTokens];
      for (int t = 0; t < kTokens; ++t)
        for (int p = 0; p < kBlocks; ++p) acc[p][t] = _mm512_set1_epi32(start[t][g + i]);
      Format::template steps<kBlocks>(w + i * Format::kBytes, stride, [&](std::int64_t s, const __m512i* v) {
        for (int t = 0; t < kTokens; ++t) {
          const __m512i four = _mm512_set1_epi32(four_values(x[t] + (g + i) * kGroup + 4 * s));
          for (int p = 0; p < kBlocks; ++p) acc[p][t] = _mm512_dpbusd_epi32(acc[p][t], v[p], four);
        }
      });
      for (int p = 0; p < kBlocks; ++p) {
        const __m512 scale = block_scales(w + p * stride + 2 * Format::kBytes + 32 * i);
        for (int t = 0; t < kTokens; ++t)
          sum[p][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[p][t]),
                                      _mm512_mul_ps(scale, _mm512_set1_ps(x_scale[t][g + i])), sum[p][t]);
      }
    }
  }
  for (int p = 0; p < kBlocks; ++p)
    for (int t = 0; t < kTokens; ++t) _mm512_storeu_ps(out + t * ldo + p * kPanelRows, sum[p][t]);
}

template <class Format, int kBlocks>
struct BlockTiles {
  template <int kTokens>
  static void tile(const char* blocks, const void* const* x_T, const Groups& some, float* out, std::int64_t ldo) {
    dot_blocks_tile<Format, kBlocks, kTokens>(blocks, x_T, some, out, ldo);
  }
};

// One tile of `count` tokens, at most kTokens.
template <class Tiles, int kTokens>
inline void dot_blocks_tile_of(std::int64_t count, const char* blocks, const void* const* x_T, const Groups& some,
                               float* out, std::int64_t ldo) {
  if (count == kTokens) return Tiles::template tile<kTokens>(blocks, x_T, some, out, ldo);
  if constexpr (kTokens > 1) dot_blocks_tile_of<Tiles, kTokens - 1>(count, blocks, x_T, some, out, ldo);
}

// Tiles of at most kMost tokens, all of about one size; columns in steps that stay in the first-level cache while all
// tokens use them.
template <class Tiles, int kMost>
inline void dot_blocks_of(const void* blocks, const void* const* x_T, std::int64_t tokens, std::int64_t n, float* out,
                          std::int64_t ldo) {
  const std::int64_t all = groups(n), step = tokens <= kMost ? all : kStepColumns / kGroup;
  for (std::int64_t g = 0; g < all; g += step) {
    Groups some{n, g, std::min(all, g + step), true};
    for (std::int64_t t = 0, count = 0; t < tokens; t += count, some.fetch = false) {
      const std::int64_t tiles = (tokens - t + kMost - 1) / kMost;
      count = (tokens - t + tiles - 1) / tiles;
      dot_blocks_tile_of<Tiles, kMost>(count, static_cast<const char*>(blocks), x_T + t, some, out + t * ldo, ldo);
    }
  }
}

template <class Format>
inline void dot_blocks(PI2_DOT_BLOCKS_ARGS) {
  if (count == 1) return dot_blocks_of<BlockTiles<Format, 1>, 6>(blocks, x_T, tokens, n, out, ldo);
  return dot_blocks_of<BlockTiles<Format, 2>, 6>(blocks, x_T, tokens, n, out, ldo);
}

}  // namespace
}  // namespace pi2::avx512vnni
