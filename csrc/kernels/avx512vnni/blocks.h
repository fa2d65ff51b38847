// Blocks of 16 rows, a lane each (kernels.h): what gemm.h computes from panels, read from memory as it is stored, for
// few tokens. A block is one stream, so that the processor's own prefetching is enough; inputs are broadcast from the
// first-level cache.
#pragma once

#include "kernels/avx512vnni/gemm.h"

// Unnamed: functions that are compiled with other flags elsewhere must stay apart (the linker would keep one of them).
namespace pi2::avx512vnni {
namespace {

// For each format: bytes of a group's values, and use(s, v) for its steps s: v has the columns 4 s..4 s + 3 of 16 rows.
struct BlockQ4 {
  static constexpr std::int64_t kBytes = 4 * 64;
  template <class Use>
  static void steps(const char* w, const Use& use) {
    const __m512i low_half = _mm512_set1_epi8(15);
    for (std::int64_t d = 0; d < 4; ++d) {
      const __m512i nibbles = _mm512_loadu_si512(w + 64 * d);
      use(d, _mm512_and_si512(nibbles, low_half));
      use(4 + d, _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), low_half));
    }
  }
};

struct BlockQ8 {
  static constexpr std::int64_t kBytes = 8 * 64;
  template <class Use>
  static void steps(const char* w, const Use& use) {
    for (std::int64_t s = 0; s < kStepsOfGroup; ++s) use(s, _mm512_loadu_si512(w + 64 * s));
  }
};

constexpr std::uintptr_t kAheadBytes = 8192;  // two pages: what the processor prefetches by itself ends with each

inline __m512 block_scales(const char* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

template <class Format, int kTokens>
inline void dot_blocks_tile(const void* block, const void* const* x_T, std::int64_t n, float* out, std::int64_t ldo) {
  const char* w = static_cast<const char*>(block);
  const std::int8_t* x[kTokens];
  const float* x_scale[kTokens];
  const std::int32_t* start[kTokens];
  __m512 sum[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    const GemmInput input(x_T[t], n);
    x[t] = input.values;
    x_scale[t] = input.scale;
    start[t] = input.start;
    sum[t] = _mm512_setzero_ps();
  }
  for (std::int64_t g = 0; g < groups(n); g += 2, w += 2 * Format::kBytes + 64) {
    const auto ahead = reinterpret_cast<std::uintptr_t>(w) + kAheadBytes;  // a number: it may pass the matrix's end
    for (std::int64_t line = 0; line < 2 * Format::kBytes + 64; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(ahead + line), _MM_HINT_T0);
    for (std::int64_t i = 0; i < 2; ++i) {
      __m512i acc[kTokens];
      for (int t = 0; t < kTokens; ++t) acc[t] = _mm512_set1_epi32(start[t][g + i]);
      Format::steps(w + i * Format::kBytes, [&](std::int64_t s, __m512i v) {
        for (int t = 0; t < kTokens; ++t)
          acc[t] = _mm512_dpbusd_epi32(acc[t], v, _mm512_set1_epi32(four_values(x[t] + (g + i) * kGroup + 4 * s)));
      });
      const __m512 scale = block_scales(w + 2 * Format::kBytes + 32 * i);
      for (int t = 0; t < kTokens; ++t)
        sum[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[t]), _mm512_mul_ps(scale, _mm512_set1_ps(x_scale[t][g + i])),
                                 sum[t]);
    }
  }
  for (int t = 0; t < kTokens; ++t) _mm512_storeu_ps(out + t * ldo, sum[t]);
}

template <class Format>
inline void dot_blocks(PI2_DOT_BLOCKS_ARGS) {
  std::int64_t t = 0;
  for (; t + 8 <= tokens; t += 8) dot_blocks_tile<Format, 8>(block, x_T + t, n, out + t * ldo, ldo);
  for (; t + 4 <= tokens; t += 4) dot_blocks_tile<Format, 4>(block, x_T + t, n, out + t * ldo, ldo);
  for (; t + 2 <= tokens; t += 2) dot_blocks_tile<Format, 2>(block, x_T + t, n, out + t * ldo, ldo);
  for (; t < tokens; ++t) dot_blocks_tile<Format, 1>(block, x_T + t, n, out + t * ldo, ldo);
}

template <class Format>
inline void panel_blocks(PI2_PANEL_BLOCKS_ARGS) {
  const char* w = static_cast<const char*>(block);
  auto* out = static_cast<char*>(panel);
  auto* scales = reinterpret_cast<float*>(out + kPanelRows * padded(n));
  for (std::int64_t g = 0; g < groups(n); g += 2, w += 2 * Format::kBytes + 64) {
    for (std::int64_t i = 0; i < 2; ++i, out += kStepsOfGroup * 64, scales += kPanelRows) {
      Format::steps(w + i * Format::kBytes, [&](std::int64_t s, __m512i v) { _mm512_storeu_si512(out + 64 * s, v); });
      _mm512_storeu_ps(scales, block_scales(w + 2 * Format::kBytes + 32 * i));
    }
  }
}

}  // namespace
}  // namespace pi2::avx512vnni
