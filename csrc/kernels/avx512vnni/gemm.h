// Prompts: 16 rows to a vector, one lane each, so that no sum is ever taken across lanes.
//
// A panel is, for every group of 32 columns, 8 vectors (columns 4 s..4 s + 3 of 16 rows, unsigned) and, behind all of
// them, 16 scales per group. A prepared x is its int8 values in plain order, then a scale and a start (minus the
// weights' offset times the sum of the group's values) per group. Of ggml's blocks there are 16 scales and 16 minima,
// and for the start what these are multiplied by, or 16 scales for each half of a group, and a start for each.
#pragma once

#include "kernels/avx512vnni/impl.h"

// Unnamed: functions that are compiled with other flags elsewhere must stay apart (the linker would keep one of them).
namespace pi2::avx512vnni {
namespace {

constexpr std::int64_t kStepsOfGroup = kGroup / 4;

// What a panel has for each row and group.
enum class PanelOf { kScales, kMinima, kHalves };

// Lane j of vector i becomes lane i of vector j.
inline void transpose(__m512i v[16]) {
  __m512i a[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  // v[4 q + c]: column 4 lane + c of rows 4 q..4 q + 3, in 128-bit lane `lane`.
  for (int q = 0; q < 4; ++q) {
    v[4 * q] = _mm512_unpacklo_epi64(a[4 * q], a[4 * q + 2]);
    v[4 * q + 1] = _mm512_unpackhi_epi64(a[4 * q], a[4 * q + 2]);
    v[4 * q + 2] = _mm512_unpacklo_epi64(a[4 * q + 1], a[4 * q + 3]);
    v[4 * q + 3] = _mm512_unpackhi_epi64(a[4 * q + 1], a[4 * q + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512i low = _mm512_shuffle_i32x4(v[c], v[4 + c], 0x44), high = _mm512_shuffle_i32x4(v[c], v[4 + c], 0xee);
    const __m512i low2 = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0x44);
    const __m512i high2 = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0xee);
    a[c] = _mm512_shuffle_i32x4(low, low2, 0x88);
    a[4 + c] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    a[8 + c] = _mm512_shuffle_i32x4(high, high2, 0x88);
    a[12 + c] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
  for (int i = 0; i < 16; ++i) v[i] = a[i];
}

inline void panel_scales(const void* const* rows, std::int64_t values_bytes, std::int64_t n, float* scales) {
  const std::int64_t n_groups = groups(n), all = padded(n) / kGroup;
  for (std::int64_t g = 0; g < all; g += 16) {
    const std::int64_t left = std::max<std::int64_t>(0, std::min<std::int64_t>(16, n_groups - g));
    const __mmask16 m = static_cast<__mmask16>((1u << left) - 1u);
    __m512i v[16];
    for (int r = 0; r < 16; ++r)
      v[r] = _mm512_castps_si512(
          _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, static_cast<const char*>(rows[r]) + values_bytes + 2 * g)));
    transpose(v);
    for (std::int64_t j = 0; j < std::min<std::int64_t>(16, all - g); ++j)
      _mm512_storeu_ps(scales + 16 * (g + j), _mm512_castsi512_ps(v[j]));
  }
}

inline void panel_q4(PI2_PANEL_ARGS) {
  auto* out = static_cast<char*>(panel);
  const __m512i low_half = _mm512_set1_epi8(15);
  for (std::int64_t g = 0; g < groups(n); g += 4) {
    __m512i v[16];
    for (int r = 0; r < 16; ++r)
      v[r] = avx512::nibbles_of_4(static_cast<const char*>(rows[r]) + g * (kGroup / 2), groups(n) - g);
    transpose(v);  // v[4 i + d]: bytes 4 d..4 d + 3 of group g + i
    for (int i = 0; i < 4; ++i) {
      for (int d = 0; d < 4; ++d) {
        const __m512i nibbles = v[4 * i + d];
        char* to = out + ((g + i) * kStepsOfGroup + d) * 64;
        _mm512_storeu_si512(to, _mm512_and_si512(nibbles, low_half));
        _mm512_storeu_si512(to + 4 * 64, _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), low_half));
      }
    }
  }
  panel_scales(rows, groups(n) * (kGroup / 2), n, reinterpret_cast<float*>(out + kPanelRows * padded(n)));
}

inline void panel_q8(PI2_PANEL_ARGS) {
  auto* out = static_cast<char*>(panel);
  const __m512i offset = _mm512_set1_epi8(-128);
  for (std::int64_t g = 0; g < groups(n); g += 2) {
    const __mmask64 m = groups(n) - g >= 2 ? ~std::uint64_t{0} : 0xffffffffu;
    __m512i v[16];
    for (int r = 0; r < 16; ++r) v[r] = _mm512_maskz_loadu_epi8(m, static_cast<const char*>(rows[r]) + g * kGroup);
    transpose(v);
    for (int s = 0; s < 16; ++s)
      _mm512_storeu_si512(out + (g * kStepsOfGroup + s) * 64, _mm512_xor_si512(v[s], offset));
  }
  panel_scales(rows, groups(n) * kGroup, n, reinterpret_cast<float*>(out + kPanelRows * padded(n)));
}

// Parts of a prepared x.
struct GemmInput {
  const std::int8_t* values;  // [padded(n)]
  const float* scale;         // [padded(n) / 32]
  const std::int32_t* start;  // [padded(n) / 32], or two for each group

  GemmInput(const void* x, std::int64_t n)
      : values(static_cast<const std::int8_t*>(x)),
        scale(reinterpret_cast<const float*>(values + padded(n))),
        start(reinterpret_cast<const std::int32_t*>(scale + padded(n) / kGroup)) {}
};

inline void prepare_gemm(const float* x, std::int64_t n, void* out, std::int32_t offset) {
  auto* values = static_cast<std::int8_t*>(out);
  auto* scale = reinterpret_cast<float*>(values + padded(n));
  auto* start = reinterpret_cast<std::int32_t*>(scale + padded(n) / kGroup);
  for (std::int64_t g = 0; g < padded(n) / kGroup; ++g) {
    const std::int64_t left = n - g * kGroup;
    std::int8_t* to = values + g * kGroup;
    if (left <= 0) std::memset(to, 0, kGroup);
    scale[g] = left > 0 ? quantize_group(x + g * kGroup, std::min(left, kGroup), to) : 0.0f;
    start[g] = -offset * sum_of_group(to);
  }
}

inline std::int32_t four_values(const void* p) {
  std::int32_t four;
  std::memcpy(&four, p, sizeof(four));
  return four;
}

inline float float_at(const char* p) {
  float number;
  std::memcpy(&number, p, sizeof(number));
  return number;
}

// Columns of panels that stay in the first-level cache while all tokens use them.
constexpr std::int64_t kChunkColumns = 512;

// Where panels lie, whose first group is group `first` of the rows.
struct Panels {
  const char* values[kGemmPanels];
  const float* floats[kGemmPanels];
  std::int64_t first;
};

// The groups [begin, end) of all rows; sums go on from what is in `out` unless begin is 0. What belongs to a group is
// found from one pointer to each input and offsets that all have in common: more pointers would not fit the registers.
// Nor would the sums with halves, which are then in memory.
template <PanelOf kOf, int kPanels, int kTokens>
inline void gemm_tile(const Panels& panels, const void* const* x_T, std::int64_t n, std::int64_t begin,
                      std::int64_t end, float* out, std::int64_t ldo) {
  constexpr std::int64_t kParts = kOf == PanelOf::kHalves ? 2 : 1;    // of a group, with a scale each
  constexpr std::int64_t kVectors = kOf == PanelOf::kScales ? 1 : 2;  // of floats
  constexpr std::int64_t kSteps = kStepsOfGroup / kParts;
  const char* w[kPanels];
  const float* w_floats[kPanels];
  const char* x[kTokens];
  __m512 sum[kPanels][kTokens];
  const auto go_on = static_cast<__mmask16>(begin == 0 ? 0 : 0xffff);  // a branch would take sums through memory
  for (int p = 0; p < kPanels; ++p) {
    w[p] = panels.values[p] + (begin - panels.first) * kStepsOfGroup * 64;
    w_floats[p] = panels.floats[p] + (begin - panels.first) * kVectors * kPanelRows;
    for (int t = 0; t < kTokens; ++t) sum[p][t] = _mm512_maskz_loadu_ps(go_on, out + t * ldo + p * kPanelRows);
  }
  for (int t = 0; t < kTokens; ++t) x[t] = static_cast<const char*>(x_T[t]);
  std::int64_t scale_at = padded(n) + 4 * begin, start_at = padded(n) + 4 * (padded(n) / kGroup + begin * kParts);
  for (std::int64_t at = begin * kGroup; at < end * kGroup; at += kGroup, scale_at += 4) {
    __m512 product[kPanels][kTokens];  // with halves: of both
    if constexpr (kOf == PanelOf::kHalves) __asm__("" : "+m"(sum));
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part, start_at += 4) {
      __m512i acc[kPanels][kTokens];
      for (int t = 0; t < kTokens; ++t)
        for (int p = 0; p < kPanels; ++p)
          acc[p][t] =
              kOf == PanelOf::kMinima ? _mm512_setzero_si512() : _mm512_set1_epi32(four_values(x[t] + start_at));
#pragma GCC unroll 8
      for (std::int64_t s = part * kSteps; s < (part + 1) * kSteps; ++s) {
        __m512i v[kPanels];
        for (int p = 0; p < kPanels; ++p) v[p] = _mm512_loadu_si512(w[p] + s * 64);
        for (int t = 0; t < kTokens; ++t) {
          const __m512i four = _mm512_set1_epi32(four_values(x[t] + at + 4 * s));
          for (int p = 0; p < kPanels; ++p) acc[p][t] = _mm512_dpbusd_epi32(acc[p][t], v[p], four);
        }
      }
      for (int p = 0; p < kPanels; ++p) {
        const __m512 scale = _mm512_loadu_ps(w_floats[p] + part * kPanelRows);
        for (int t = 0; t < kTokens; ++t) {
          const __m512 by = _mm512_set1_ps(float_at(x[t] + scale_at)), whole = _mm512_cvtepi32_ps(acc[p][t]);
          if constexpr (kOf != PanelOf::kHalves)
            sum[p][t] = _mm512_fmadd_ps(whole, _mm512_mul_ps(scale, by), sum[p][t]);
          else if (part == 0)
            product[p][t] = _mm512_mul_ps(whole, scale);
          else
            sum[p][t] = _mm512_fmadd_ps(_mm512_fmadd_ps(whole, scale, product[p][t]), by, sum[p][t]);
        }
        if constexpr (kOf == PanelOf::kMinima) {
          const __m512 least = _mm512_loadu_ps(w_floats[p] + kPanelRows);
          for (int t = 0; t < kTokens; ++t)
            sum[p][t] = _mm512_fmadd_ps(least, _mm512_set1_ps(float_at(x[t] + start_at)), sum[p][t]);
        }
      }
    }
    for (int p = 0; p < kPanels; ++p) {
      w[p] += kStepsOfGroup * 64;
      w_floats[p] += kVectors * kPanelRows;
    }
  }
  for (int p = 0; p < kPanels; ++p)
    for (int t = 0; t < kTokens; ++t) _mm512_storeu_ps(out + t * ldo + p * kPanelRows, sum[p][t]);
}

// One tile of `count` tokens, at most kTokens.
template <PanelOf kOf, int kPanels, int kTokens>
inline void gemm_tile_of(std::int64_t count, const Panels& panels, const void* const* x_T, std::int64_t n,
                         std::int64_t begin, std::int64_t end, float* out, std::int64_t ldo) {
  if (count == kTokens) return gemm_tile<kOf, kPanels, kTokens>(panels, x_T, n, begin, end, out, ldo);
  if constexpr (kTokens > 1) gemm_tile_of<kOf, kPanels, kTokens - 1>(count, panels, x_T, n, begin, end, out, ldo);
}

// All tokens in tiles of at most kTokens, all of about one size.
template <PanelOf kOf, int kPanels, int kTokens>
inline void gemm_chunk(const Panels& panels, const void* const* x_T, std::int64_t tokens, std::int64_t n,
                       std::int64_t begin, std::int64_t end, float* out, std::int64_t ldo) {
  for (std::int64_t t = 0, count = 0; t < tokens; t += count) {
    const std::int64_t tiles = (tokens - t + kTokens - 1) / kTokens;
    count = (tokens - t + tiles - 1) / tiles;
    gemm_tile_of<kOf, kPanels, kTokens>(count, panels, x_T + t, n, begin, end, out + t * ldo, ldo);
  }
}

template <PanelOf kOf, int kPanels, int kTokens>
inline void gemm_panels(PI2_GEMM_ARGS) {
  (void)panel_count;
  constexpr std::int64_t kGroups = kChunkColumns / kGroup;
  Panels whole{};
  for (int p = 0; p < kPanels; ++p) {
    whole.values[p] = static_cast<const char*>(panels[p]);
    whole.floats[p] = reinterpret_cast<const float*>(whole.values[p] + kPanelRows * padded(n));
  }
  for (std::int64_t g = 0; g < groups(n); g += kGroups)
    gemm_chunk<kOf, kPanels, kTokens>(whole, x_T, tokens, n, g, std::min(groups(n), g + kGroups), out, ldo);
}

template <PanelOf kOf>
inline void gemm(PI2_GEMM_ARGS) {
  if (panel_count == 1) return gemm_panels<kOf, 1, 8>(panels, panel_count, x_T, tokens, n, out, ldo);
  return gemm_panels<kOf, 2, 6>(panels, panel_count, x_T, tokens, n, out, ldo);
}

}  // namespace
}  // namespace pi2::avx512vnni
