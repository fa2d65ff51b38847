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
  using typename Format::Pairs;
  static constexpr int kParts = GgmlRows<Format>::kParts;

  static Sums zero_sums() { return _mm512_setzero_ps(); }
  static float total(Sums sums) { return _mm512_reduce_add_ps(sums); }

  // The numbers at, at + 2, ... over four lanes each.
  static __m512 spread(__m512 v, int at) {
    return _mm512_permutexvar_ps(Format::quarters(at, at + 2, at + 4, at + 6), v);
  }

  static void add_step(Sums* sums, Pairs pairs, const Numbers (&numbers)[kParts], const GgmlInput& x) {
    constexpr bool kHalves = has_halves(Format::kDType);
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

}  // namespace
}  // namespace pi2::avx512vnni
