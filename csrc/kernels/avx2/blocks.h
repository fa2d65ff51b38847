// Blocks of 16 rows, eight to a vector, with int8 activations: four values of x, broadcast, meet four columns of each
// row. What a8.h says of VPMADDUBSW holds here too; of int4 even the products of a whole group fit into 16 bits: 16 to
// a lane, of up to 15 * 127.
#pragma once

#include "kernels/avx2/a8.h"
#include "kernels/blocks.h"

namespace pi2::avx2 {

struct BlockSimd : Simd {
  static constexpr int kTogether = 2;

  static Float to_floats(Int v) { return _mm256_cvtepi32_ps(v); }
  static Float scales(const char* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static float quantize_group(const float* x, std::int64_t count, std::int8_t* out) {
    return avx2::quantize_group(x, count, out);
  }
  // Without this barrier the compiler takes all products first and adds them in pairs, spilling most.
  static void keep_order(Int& sum) { __asm__("" : "+x"(sum)); }
  static Int four_values(const std::int8_t* x) {
    std::int32_t four;
    std::memcpy(&four, x, sizeof(four));
    return _mm256_set1_epi32(four);
  }
};

struct BlockQ4 : BlockSimd {
  static constexpr std::int64_t kBytes = 4 * 64;
  static constexpr std::int32_t kOffset = 8;

  template <int kTokens>
  static void group(const char* w, const std::int8_t* const (&x)[kTokens], std::int64_t k,
                    const std::int32_t (&start)[kTokens], Int (&sums)[kTogether][kTokens]) {
    const Int low_half = _mm256_set1_epi8(15);
    for (int v = 0; v < kTogether; ++v)
      for (int t = 0; t < kTokens; ++t) sums[v][t] = _mm256_setzero_si256();
    for (int d = 0; d < 4; ++d) {
      Int low[kTogether], high[kTogether];
      for (int v = 0; v < kTogether; ++v) {
        const Int bytes = load_bytes(w + 64 * d + 32 * v);
        low[v] = _mm256_and_si256(bytes, low_half);
        high[v] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low_half);
      }
      for (int t = 0; t < kTokens; ++t) {
        const Int x_low = four_values(x[t] + k + 4 * d), x_high = four_values(x[t] + k + 16 + 4 * d);
        for (int v = 0; v < kTogether; ++v) {
          sums[v][t] = _mm256_add_epi16(sums[v][t], _mm256_maddubs_epi16(low[v], x_low));
          sums[v][t] = _mm256_add_epi16(sums[v][t], _mm256_maddubs_epi16(high[v], x_high));
          keep_order(sums[v][t]);
        }
      }
    }
    for (int v = 0; v < kTogether; ++v)
      for (int t = 0; t < kTokens; ++t) sums[v][t] = _mm256_add_epi32(pairs(sums[v][t]), _mm256_set1_epi32(start[t]));
  }
};

struct BlockQ8 : BlockSimd {
  static constexpr std::int64_t kBytes = 8 * 64;
  static constexpr std::int32_t kOffset = 0;

  template <int kTokens>
  static void group(const char* w, const std::int8_t* const (&x)[kTokens], std::int64_t k,
                    const std::int32_t (&)[kTokens], Int (&sums)[kTogether][kTokens]) {
    for (int v = 0; v < kTogether; ++v)
      for (int t = 0; t < kTokens; ++t) sums[v][t] = _mm256_setzero_si256();
    for (int s = 0; s < 8; ++s) {
      Int values[kTogether], magnitude[kTogether];
      for (int v = 0; v < kTogether; ++v) {
        values[v] = _mm256_xor_si256(load_bytes(w + 64 * s + 32 * v), _mm256_set1_epi8(-128));
        magnitude[v] = _mm256_abs_epi8(values[v]);  // -128 becomes 128: unsigned from here on
      }
      for (int t = 0; t < kTokens; ++t) {
        const Int four = four_values(x[t] + k + 4 * s);
        for (int v = 0; v < kTogether; ++v)
          sums[v][t] = _mm256_add_epi32(sums[v][t],
                                        pairs(_mm256_maddubs_epi16(magnitude[v], _mm256_sign_epi8(four, values[v]))));
      }
    }
  }
};

}  // namespace pi2::avx2
