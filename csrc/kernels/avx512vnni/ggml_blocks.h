// ggml's blocks in blocks of 16 rows, a lane each (kernels.h): what gemm.h computes from panels, bit for bit, read from
// memory as it is stored, for few tokens.
#pragma once

#include "kernels/avx512vnni/blocks.h"
#include "kernels/avx512vnni/ggml.h"

// Unnamed: functions that are compiled with other flags elsewhere must stay apart (the linker would keep one of them).
namespace pi2::avx512vnni {
namespace {

// Four bytes of each row.
inline __m512i word(const char* w, int i) { return _mm512_loadu_si512(w + 64 * i); }
inline __m512i low_bits(__m512i v, int bits) { return avx512::GgmlSimd::low_bits(v, bits); }
inline __m512 widened(__m512i halves) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves)); }

// For each format: kDType, scale and minimum (with minima) of a group (of q6_k: of half a one), and four(w, g, s): the
// columns 4 s..4 s + 3 of group g, unsigned.
template <DType kType>
struct SmallBlock {
  static constexpr DType kDType = kType;
  static constexpr int kMin = kType == DType::kQ5_0 ? 0 : 1, kFifth = kType == DType::kQ4_1 ? 0 : 1;
  static constexpr std::int64_t kBytes = kPanelRows * ggml_block(kType).bytes;  // of a group
  const char* w;

  explicit SmallBlock(const char* w) : w(w) {}
  __m512 scale(int g) const {
    return kMin == 1 ? widened(word(w + g * kBytes, 0)) : block_scales(w + (g + 1) * kBytes - 32);
  }
  __m512 minimum(int g) const { return widened(_mm512_srli_epi32(word(w + g * kBytes, 0), 16)); }

  static __m512i four(const char* w, int g, int s) {
    const __m512i both = word(w + g * kBytes, kMin + kFifth + s % 4);
    const __m512i nibbles = low_bits(s < 4 ? both : _mm512_srli_epi16(both, 4), 4);
    if constexpr (kFifth == 0) return nibbles;
    // Byte s / 2 of the high bits has them for these columns and four others.
    const __m512i bits = _mm512_shuffle_epi8(
        word(w + g * kBytes, kMin),
        _mm512_add_epi8(_mm512_set1_epi8(static_cast<char>(s / 2)),
                        _mm512_broadcast_i32x4(_mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0))));
    const __mmask64 high = _mm512_test_epi8_mask(bits, _mm512_set1_epi32(s % 2 == 0 ? 0x08040201 : 0x80402010));
    return _mm512_mask_add_epi8(nibbles, high, nibbles, _mm512_set1_epi8(16));
  }
};

template <DType kType>
struct KBlock {
  static constexpr DType kDType = kType;
  static constexpr bool kFifth = kType == DType::kQ5K;
  __m512 d, least;
  __m512i scales[2], minima[2];  // a byte each

  explicit KBlock(const char* w) {
    const __m512i both = word(w, 0), a = word(w, 1), b = word(w, 2), c = word(w, 3);
    d = widened(both);
    least = widened(_mm512_srli_epi32(both, 16));
    const __m512i two = _mm512_set1_epi8(0x30);
    scales[0] = low_bits(a, 6);
    scales[1] = _mm512_or_si512(low_bits(c, 4), _mm512_and_si512(_mm512_srli_epi32(a, 2), two));
    minima[0] = low_bits(b, 6);
    minima[1] = _mm512_or_si512(low_bits(_mm512_srli_epi32(c, 4), 4), _mm512_and_si512(_mm512_srli_epi32(b, 2), two));
  }
  static __m512 byte(__m512i v, int i) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srlv_epi32(v, _mm512_set1_epi32(8 * i)), _mm512_set1_epi32(255)));
  }
  __m512 scale(int g) const { return _mm512_mul_ps(byte(scales[g / 4], g % 4), d); }
  __m512 minimum(int g) const { return _mm512_mul_ps(byte(minima[g / 4], g % 4), least); }

  static __m512i four(const char* w, int g, int s) {
    const __m512i both = word(w, (kFifth ? 12 : 4) + g / 2 * 8 + s);
    const __m512i nibbles = low_bits(g % 2 == 0 ? both : _mm512_srli_epi16(both, 4), 4);
    if constexpr (!kFifth) return nibbles;
    const __m512i fifth = _mm512_rolv_epi32(word(w, 4 + s), _mm512_set1_epi32((36 - g) % 32));  // bit g to bit 4
    return _mm512_ternarylogic_epi32(nibbles, fifth, _mm512_set1_epi8(16), 0xf8);               // nibbles | (.. & ..)
  }
};

struct BlockQ6K {
  static constexpr DType kDType = DType::kQ6K;
  __m512 d;
  const char* scales;  // of two groups in four bytes

  explicit BlockQ6K(const char* w)
      : d(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 52 * 64)))), scales(w + 48 * 64) {}
  __m512 scale(int half) const {
    const __m512i top = _mm512_sllv_epi32(word(scales, half / 4), _mm512_set1_epi32(24 - half % 4 * 8));
    return _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24)));
  }

  static __m512i four(const char* w, int g, int s) {
    const int part = g / 4, of_part = g % 4;
    const __m512i both = word(w, part * 16 + of_part % 2 * 8 + s);
    const __m512i nibbles = low_bits(of_part < 2 ? both : _mm512_srli_epi16(both, 4), 4);
    const __m512i high =  // bits 2 of_part and 2 of_part + 1 to bits 4 and 5
        _mm512_rolv_epi32(word(w, 32 + part * 8 + s), _mm512_set1_epi32((36 - 2 * of_part) % 32));
    return _mm512_ternarylogic_epi32(nibbles, high, _mm512_set1_epi8(48), 0xf8);
  }
};

struct BlockTQ2 {
  static constexpr DType kDType = DType::kTQ2;
  __m512 d;

  explicit BlockTQ2(const char* w)
      : d(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 16 * 64)))) {}
  __m512 scale(int) const { return d; }

  static __m512i four(const char* w, int g, int s) {
    return low_bits(_mm512_srlv_epi32(word(w, g / 4 * 8 + s), _mm512_set1_epi32(g % 4 * 2)), 2);
  }
};

template <class Format>
struct GgmlBlocks {
  static constexpr PanelOf kOf = panel_of(Format::kDType);
  static constexpr bool kMinima = kOf == PanelOf::kMinima;
  // Of a group, each with a scale.
  static constexpr int kParts = kOf == PanelOf::kHalves ? 2 : 1, kSteps = kStepsOfGroup / kParts;
  static constexpr std::int64_t kNumbers = std::max<std::int64_t>(2 * kGroup, ggml_block(Format::kDType).numbers);
  static constexpr std::int64_t kGroups = kNumbers / kGroup;
  static constexpr std::int64_t kBytes = kPanelRows * row_bytes(Format::kDType, kNumbers);
  static constexpr std::int64_t kMostAsStored = 8;  // tokens; more share what unpacking costs

  // Sums go on from what is in `out` unless these are the first columns.
  template <int kTokens>
  static void tile(const char* block, const void* const* x_T, const Groups& some, float* out, std::int64_t ldo) {
    const std::int8_t* x[kTokens];
    const float* x_scale[kTokens];
    const std::int32_t* start[kTokens];
    __m512 sum[kTokens];
    for (int t = 0; t < kTokens; ++t) {
      const GemmInput input(x_T[t], some.n);
      x[t] = input.values + some.begin * kGroup;
      x_scale[t] = input.scale + some.begin;
      start[t] = input.start + some.begin * kParts;
      sum[t] = some.begin == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(out + t * ldo);
    }
    __m512 product[kTokens];  // with halves: of the first one
    const char* w = block + some.begin / kGroups * kBytes;
    for (std::int64_t g = some.begin; g < some.end; g += kGroups, w += kBytes) {
      constexpr std::uintptr_t kAhead = kNumbers == 2 * kGroup && kTokens == 1 ? kAheadOfOne : kAheadBytes;
      const auto ahead = reinterpret_cast<std::uintptr_t>(w) + kAhead;  // may pass the matrix's end
      for (std::int64_t line = 0; some.fetch && line < kBytes; line += 64)
        fetch(reinterpret_cast<const void*>(ahead + line));
      const Format of(w);
#pragma GCC unroll 16
      for (int part = 0; part < static_cast<int>(kGroups) * kParts; ++part) {
        const int group = part / kParts, first = part % kParts * kSteps;
        __m512i acc[kTokens];
        for (int t = 0; t < kTokens; ++t) acc[t] = kMinima ? _mm512_setzero_si512() : _mm512_set1_epi32(start[t][part]);
#pragma GCC unroll 8
        for (int s = first; s < first + kSteps; ++s) {
          const __m512i v = Format::four(w, group, s);
          for (int t = 0; t < kTokens; ++t)
            acc[t] = _mm512_dpbusd_epi32(acc[t], v, _mm512_set1_epi32(four_values(x[t] + group * kGroup + 4 * s)));
        }
        const __m512 scale = of.scale(part);
        for (int t = 0; t < kTokens; ++t) {
          const __m512 by = _mm512_set1_ps(x_scale[t][group]), whole = _mm512_cvtepi32_ps(acc[t]);
          if constexpr (kParts == 1)
            sum[t] = _mm512_fmadd_ps(whole, _mm512_mul_ps(scale, by), sum[t]);
          else if (part % 2 == 0)
            product[t] = _mm512_mul_ps(whole, scale);
          else
            sum[t] = _mm512_fmadd_ps(_mm512_fmadd_ps(whole, scale, product[t]), by, sum[t]);
        }
        if constexpr (kMinima) {
          const __m512 minimum = of.minimum(part);
          for (int t = 0; t < kTokens; ++t)
            sum[t] = _mm512_fmadd_ps(minimum, _mm512_castsi512_ps(_mm512_set1_epi32(start[t][group])), sum[t]);
        }
      }
      for (int t = 0; t < kTokens; ++t) {
        x[t] += kNumbers;
        x_scale[t] += kGroups;
        start[t] += kGroups * kParts;
      }
    }
    for (int t = 0; t < kTokens; ++t) _mm512_storeu_ps(out + t * ldo, sum[t]);
  }

  // The groups [begin, end) of blocks as panels; then all tokens.
  template <int kPanels, int kTokens>
  static void unpacked(const char* blocks, std::int64_t stride, const void* const* x_T, std::int64_t tokens,
                       std::int64_t n, std::int64_t begin, std::int64_t end, float* out, std::int64_t ldo) {
    alignas(64) char values[kPanels][kPanelRows * kChunkColumns];
    alignas(64) float floats[kPanels][2 * kPanelRows * kChunkColumns / kGroup];
    Panels panels{};
    for (int p = 0; p < kPanels; ++p) {
      char* to = values[p];
      float* numbers = floats[p];
      panels.values[p] = to;
      panels.floats[p] = numbers;
      panels.first = begin;
      const char* w = blocks + p * stride + begin / kGroups * kBytes;
      for (std::int64_t g = begin; g < end; g += kGroups, w += kBytes) {
        const Format of(w);
#pragma GCC unroll 8
        for (int group = 0; group < static_cast<int>(kGroups); ++group) {
#pragma GCC unroll 8
          for (int s = 0; s < static_cast<int>(kStepsOfGroup); ++s, to += 64)
            _mm512_store_si512(to, Format::four(w, group, s));
          for (int i = 0; i < kParts; ++i, numbers += kPanelRows)
            _mm512_store_ps(numbers, of.scale(kParts * group + i));
          if constexpr (kMinima) {
            _mm512_store_ps(numbers, of.minimum(group));
            numbers += kPanelRows;
          }
        }
      }
    }
    // What the next call reads: these blocks' next columns, or the blocks behind them (or behind the matrix).
    const char* ahead[kPanels];
    for (int p = 0; p < kPanels; ++p)
      ahead[p] = blocks + (end == groups(n) ? kPanels * stride : end / kGroups * kBytes) + p * stride;
    constexpr std::int64_t kSome = 4 * kTokens, kBehind = kChunkColumns / kGroup / kGroups * kBytes;
    for (std::int64_t t = 0; t < tokens; t += kSome) {
      const std::int64_t count = std::min(kSome, tokens - t), line = kBehind * t / tokens / 64 * 64;
      for (const char* p : ahead)
        for (std::int64_t at = line; at < kBehind * (t + count) / tokens; at += 64) _mm_prefetch(p + at, _MM_HINT_T1);
      gemm_chunk<kOf, kPanels, kTokens>(panels, x_T + t, count, n, begin, end, out + t * ldo, ldo);
    }
  }

  static void dot(PI2_DOT_BLOCKS_ARGS) {
    const std::int64_t bytes = n / kNumbers * kBytes;
    constexpr std::int64_t kStep = kChunkColumns / kGroup;
    if (tokens > kMostAsStored) {
      for (std::int64_t g = 0; g < groups(n); g += kStep)
        (count == 1 ? unpacked<1, 8> : unpacked<2, 6>)(static_cast<const char*>(blocks), bytes, x_T, tokens, n, g,
                                                       std::min(groups(n), g + kStep), out, ldo);
      return;
    }
    for (std::int64_t b = 0; b < count; ++b)
      dot_blocks_of<GgmlBlocks, 6>(static_cast<const char*>(blocks) + b * bytes, x_T, tokens, n, out + b * kPanelRows,
                                   ldo);
  }
};

}  // namespace
}  // namespace pi2::avx512vnni
