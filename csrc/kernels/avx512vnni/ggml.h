// ggml's blocks and int8 activations with VPDPBUSD: lanes of 32 bits are four of each group in a row. And prompts.
#pragma once

#include "kernels/avx512/ggml.h"
#include "kernels/avx512vnni/gemm.h"

// Unnamed: functions that are compiled with other flags elsewhere must stay apart (the linker would keep one of them).
namespace pi2::avx512vnni {
namespace {

template <class Format>
struct Ggml : Format {
  using Sums = __m512;
  using Step = GgmlStep<Format>;
  static constexpr int kParts = GgmlRows<Format>::kParts;

  static Sums zero_sums() { return _mm512_setzero_ps(); }
  static float total(Sums sums) { return _mm512_reduce_add_ps(sums); }

  // The numbers at, at + 2, ... over four lanes each.
  static __m512 spread(__m512 v, int at) {
    return _mm512_permutexvar_ps(Format::quarters(at, at + 2, at + 4, at + 6), v);
  }

  static void add_step(Sums* sums, const Step& step, const GgmlInput& x) {
    constexpr bool kHalves = has_halves(Format::kDType);
    const auto& [pairs, numbers] = step;
    const __m512 by = kParts == 2 ? _mm512_loadu_ps(x.pairs) : _mm512_zextps256_ps512(_mm256_loadu_ps(x.pairs));
    const __m512 pair = _mm512_mul_ps(pairs, by);
    Sums sum = *sums;
    sum = kHalves ? _mm512_fmadd_ps(pairs, _mm512_loadu_ps(x.sums), sum) : _mm512_mask_add_ps(sum, 0xaaaa, sum, pair);
    for (int part = 0; part < kParts; ++part) {
      const std::int8_t* values = x.values + part * kGgmlPart;
      const __m512i zero = _mm512_setzero_si512();
      const __m512i x_second = _mm512_loadu_si512(values + kGgmlPart / 2);
      const __m512i first = _mm512_dpbusd_epi32(zero, numbers[part].first, _mm512_loadu_si512(values));
      const __m512i second = _mm512_dpbusd_epi32(kHalves ? zero : first, numbers[part].second, x_second);
      if constexpr (kHalves) sum = _mm512_fmadd_ps(spread(pair, 8 * part), _mm512_cvtepi32_ps(first), sum);
      sum = _mm512_fmadd_ps(spread(pair, 8 * part + kHalves), _mm512_cvtepi32_ps(second), sum);
    }
    *sums = sum;
  }
};

// A superblock is one vector, whose halves are the parts, and a mask gives its four times two groups.
template <>
struct Ggml<avx512::GgmlTQ2> : avx512::GgmlTQ2 {
  using Sums = __m512;
  struct Step {
    __m512 d;
    __m512i numbers;

    explicit Step(const char* p) : d(pairs(p)), numbers(_mm512_loadu_si512(p)) {}
  };

  static Sums zero_sums() { return _mm512_setzero_ps(); }
  static float total(Sums sums) { return _mm512_reduce_add_ps(sums); }

  static void add_step(Sums* sums, const Step& step, const GgmlInput& x) {
    const __m512 by = _mm512_loadu_ps(x.pairs);
    __m512 sum = _mm512_maskz_mov_ps(0xaaaa, by);
    const __m512i groups_0 = _mm512_set_epi32(8, 8, 8, 8, 8, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0);
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      const __m512i bits = _mm512_and_si512(s < 3 ? step.numbers : _mm512_srli_epi16(step.numbers, 2),
                                            _mm512_set1_epi8(static_cast<char>(3 * tq2_times(s))));
      const __m512i products = _mm512_dpbusd_epi32(_mm512_setzero_si512(), bits, _mm512_loadu_si512(x.values + 64 * s));
      const __m512 scale = _mm512_permutexvar_ps(_mm512_add_epi32(groups_0, _mm512_set1_epi32(2 * s)), by);
      sum = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(products), sum);
    }
    *sums = _mm512_fmadd_ps(step.d, sum, *sums);
  }
};

constexpr PanelOf panel_of(DType dtype) {
  return has_halves(dtype)                               ? PanelOf::kHalves
         : dtype == DType::kQ5_0 || dtype == DType::kTQ2 ? PanelOf::kScales
                                                         : PanelOf::kMinima;
}

template <class Format>
struct GgmlPanels {
  using Rows = GgmlRows<Format>;
  static constexpr PanelOf kOf = panel_of(Format::kDType);

  static void prepare(PI2_PREPARE_ARGS) {
    auto* values = static_cast<std::int8_t*>(out);
    auto* scale = reinterpret_cast<float*>(values + padded(n));
    auto* start = scale + padded(n) / kGroup;  // floats with minima, else integers
    std::memset(values, 0, static_cast<std::size_t>(padded(n)));
    for (std::int64_t g = 0; g < groups(n); ++g) {
      std::int8_t* to = values + g * kGroup;
      scale[g] = quantize_group(x + g * kGroup, kGroup, to);
      const auto offset = static_cast<std::int32_t>(ggml_offset(Format::kDType));
      const std::int32_t both[2] = {offset * sum_of_half(to), offset * sum_of_half(to + kGroup / 2)};
      const std::int32_t all = both[0] + both[1];
      if constexpr (kOf == PanelOf::kHalves)
        std::memcpy(start + 2 * g, both, sizeof(both));
      else if constexpr (kOf == PanelOf::kScales)
        std::memcpy(start + g, &all, sizeof(all));
      else
        start[g] = scale[g] * static_cast<float>(all);
    }
  }

  static void panel(PI2_PANEL_ARGS) {
    auto* out = static_cast<char*>(panel);
    auto* floats = reinterpret_cast<float*>(out + kPanelRows * padded(n));
    typename Rows::Row row[kPanelRows];
    for (std::int64_t r = 0; r < kPanelRows; ++r) row[r].at = static_cast<const char*>(rows[r]);
    for (std::int64_t k = 0; k < n; k += Rows::kStep) {
      const char* p[kPanelRows];
      __m512i pairs[kPanelRows];
      for (std::int64_t r = 0; r < kPanelRows; ++r) {
        p[r] = row[r].step(n - k);
        pairs[r] = _mm512_castps_si512(Format::pairs(p[r]));
      }
      transpose(pairs);
      constexpr std::int64_t kFloats = kOf == PanelOf::kScales ? 1 : 2;  // of a pair
      for (std::int64_t i = 0; i < 4 * kFloats * Rows::kParts; ++i)
        _mm512_storeu_si512(floats + kPanelRows * (kFloats * (k / kGroup) + i), pairs[2 / kFloats * i]);
      for (std::int64_t part = 0; part < Rows::kParts; ++part) {
        __m512i first[kPanelRows], second[kPanelRows];
        for (std::int64_t r = 0; r < kPanelRows; ++r) {
          const typename Format::Numbers numbers = Format::numbers(p[r], part);
          first[r] = numbers.first;
          second[r] = numbers.second;
        }
        transpose(first);  // vector 4 i + d: columns 4 d..4 d + 3 of group i
        transpose(second);
        for (std::int64_t i = 0; i < 16; ++i) {
          char* to = out + ((k / kGroup + 4 * part + i / 4) * kStepsOfGroup + i % 4) * 64;
          _mm512_storeu_si512(to, first[i]);
          _mm512_storeu_si512(to + 4 * 64, second[i]);
        }
      }
    }
  }

  static void gemm(PI2_GEMM_ARGS) { return avx512vnni::gemm<kOf>(panels, panel_count, x_T, tokens, n, out, ldo); }
};

}  // namespace
}  // namespace pi2::avx512vnni
