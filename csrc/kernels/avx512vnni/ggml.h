// ggml's blocks and int8 activations with VPDPBUSD: lanes of 32 bits are four of each group in a row.
#pragma once

#include "kernels/avx512/ggml.h"

// Unnamed: functions that are compiled with other flags elsewhere must stay apart (the linker would keep one of them).
namespace pi2::avx512vnni {
namespace {

template <class Format>
struct Ggml : Format {
  using Sums = __m512;
  using typename Format::Numbers;
  using typename Format::Scales;

  static Sums zero_sums() { return _mm512_setzero_ps(); }
  static float total(Sums sums) { return _mm512_reduce_add_ps(sums); }

  // As many floats as a step has groups, or halves of them; zeros in what lanes are left.
  static __m512 load_step(const float* p) {
    if constexpr (Format::kHalves) return _mm512_loadu_ps(p);
    if constexpr (GgmlRows<Format>::kParts == 2) return _mm512_zextps256_ps512(_mm256_loadu_ps(p));
    return _mm512_zextps128_ps512(_mm_loadu_ps(p));
  }
  // The numbers at, at + each, ... over four lanes each.
  static __m512 spread(__m512 v, int at, int each) {
    return _mm512_permutexvar_ps(Format::quarters(at, at + each, at + 2 * each, at + 3 * each), v);
  }

  static void add_offsets(Sums* sums, const Scales& scales, const GgmlInput<Format::kHalves>& x) {
    *sums = _mm512_fmadd_ps(scales.offset, load_step(x.sum), *sums);
  }

  static void add_products(Sums* sums, const Scales& scales, std::int64_t part, const Numbers& numbers,
                           const GgmlInput<Format::kHalves>& x) {
    const __m512 scale = _mm512_mul_ps(scales.scale, load_step(x.scale));
    const std::int8_t* values = x.values + part * kGgmlPart;
    const __m512i zero = _mm512_setzero_si512();
    const __m512i first = _mm512_dpbusd_epi32(zero, numbers.first, _mm512_loadu_si512(values));
    const __m512i x_second = _mm512_loadu_si512(values + kGgmlPart / 2);
    if constexpr (Format::kHalves) {
      const __m512i second = _mm512_dpbusd_epi32(zero, numbers.second, x_second);
      const int at = static_cast<int>(8 * part);
      *sums = _mm512_fmadd_ps(spread(scale, at, 2), _mm512_cvtepi32_ps(first), *sums);
      *sums = _mm512_fmadd_ps(spread(scale, at + 1, 2), _mm512_cvtepi32_ps(second), *sums);
    } else {
      const __m512i both = _mm512_dpbusd_epi32(first, numbers.second, x_second);
      *sums = _mm512_fmadd_ps(spread(scale, static_cast<int>(4 * part), 1), _mm512_cvtepi32_ps(both), *sums);
    }
  }
};

}  // namespace
}  // namespace pi2::avx512vnni
