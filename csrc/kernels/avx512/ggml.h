// ggml's blocks on AVX-512 (kernels/ggml.h): numbers of four groups to a vector, 16 of each.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels/avx512/impl.h"
#include "kernels/ggml.h"

// Unnamed: functions that are compiled with other flags elsewhere must stay apart (the linker would keep one of them).
namespace pi2::avx512 {
namespace {

struct GgmlSimd : Simd {
  using Pairs = Float;  // zero in what lanes are left
  struct Numbers {
    __m512i first, second;
  };

  static Float bytes(const char* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static __m128i load16(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static __m512i low_bits(__m512i v, int bits) {
    return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>((1 << bits) - 1)));
  }
  // A number for each quarter of a vector.
  static __m512i quarters(int a, int b, int c, int d) {
    return _mm512_set_epi32(d, d, d, d, c, c, c, c, b, b, b, b, a, a, a, a);
  }
  // `v` with those bits of `high`, each quarter turned to the left by its number of bits.
  static __m512i with_high(__m512i v, const char* high, __m512i turn, char bits) {
    const __m512i all = _mm512_rolv_epi32(_mm512_broadcast_i32x4(load16(high)), turn);
    return _mm512_ternarylogic_epi32(v, all, _mm512_set1_epi8(bits), 0xf8);  // v | (all & bits)
  }

  static void store(Pairs pairs, float* out) { _mm512_store_ps(out, pairs); }
  static void store(const Numbers& numbers, char* out) {
    _mm512_store_si512(out, numbers.first);
    _mm512_store_si512(out + 64, numbers.second);
  }
};

// A group to a block.
template <DType kType>
struct GgmlSmall : GgmlSimd {
  static constexpr DType kDType = kType;
  static constexpr bool kMin = kType != DType::kQ5_0, kFifth = kType != DType::kQ4_1;
  static constexpr std::int64_t kBlock = ggml_block(kType).bytes, kBits = kMin ? 4 : 2,
                                kNibbles = kBits + (kFifth ? 4 : 0);

  // The four bytes at p of four blocks.
  static __m128i words(const char* p) {
    std::int32_t w[4];
    for (int i = 0; i < 4; ++i) std::memcpy(w + i, p + i * kBlock, 4);
    return _mm_set_epi32(w[3], w[2], w[1], w[0]);
  }

  static Pairs pairs(const char* p) {
    const __m128i twice = _mm_set_epi8(13, 12, 13, 12, 9, 8, 9, 8, 5, 4, 5, 4, 1, 0, 1, 0);
    return _mm512_zextps256_ps512(_mm256_cvtph_ps(kMin ? words(p) : _mm_shuffle_epi8(words(p), twice)));
  }

  static Numbers numbers(const char* p, std::int64_t) {
    const char* q = p + kNibbles;
    __m512i nibbles = _mm512_castsi128_si512(load16(q));
    nibbles = _mm512_inserti32x4(nibbles, load16(q + kBlock), 1);
    nibbles = _mm512_inserti32x4(nibbles, load16(q + 2 * kBlock), 2);
    nibbles = _mm512_inserti32x4(nibbles, load16(q + 3 * kBlock), 3);
    Numbers out{low_bits(nibbles, 4), low_bits(_mm512_srli_epi16(nibbles, 4), 4)};
    if constexpr (kFifth) {
      const __m128i low_and_high = _mm_set_epi8(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0);
      const __m128i bits = _mm_shuffle_epi8(words(p + kBits), low_and_high);
      const __m512i five = _mm512_set1_epi8(16);
      out.first = _mm512_mask_add_epi8(out.first, static_cast<__mmask64>(_mm_cvtsi128_si64(bits)), out.first, five);
      out.second =
          _mm512_mask_add_epi8(out.second, static_cast<__mmask64>(_mm_extract_epi64(bits, 1)), out.second, five);
    }
    return out;
  }
};

template <DType kType>
struct GgmlK : GgmlSimd {
  static constexpr DType kDType = kType;
  static constexpr bool kFifth = kType == DType::kQ5K;

  static Pairs pairs(const char* p) {
    const KScales k(p + 4);
    const __m128i bytes = _mm_unpacklo_epi8(_mm_cvtsi64_si128(static_cast<long long>(k.scale)),
                                            _mm_cvtsi64_si128(static_cast<long long>(k.min)));
    std::int32_t both;
    std::memcpy(&both, p, sizeof(both));
    return mul(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), _mm512_cvtph_ps(_mm256_set1_epi32(both)));
  }

  static Numbers numbers(const char* p, std::int64_t part) {
    // Sixteen bytes have halves of two groups; each is taken twice.
    const __m512i nibbles = _mm512_loadu_si512(p + (kFifth ? 48 : 16) + 64 * part);
    const __m512i shift = _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0);
    Numbers out{low_bits(_mm512_srlv_epi64(_mm512_shuffle_i64x2(nibbles, nibbles, 0xa0), shift), 4),
                low_bits(_mm512_srlv_epi64(_mm512_shuffle_i64x2(nibbles, nibbles, 0xf5), shift), 4)};
    if constexpr (kFifth) {
      const __m512i turn = part == 0 ? quarters(4, 3, 2, 1) : quarters(0, 31, 30, 29);  // bit 4 part + i to bit 4
      out.first = with_high(out.first, p + 16, turn, 16);
      out.second = with_high(out.second, p + 32, turn, 16);
    }
    return out;
  }
};

struct GgmlQ6K : GgmlSimd {
  static constexpr DType kDType = DType::kQ6K;

  static Pairs pairs(const char* p) {
    return mul(set1(half(p + 208)), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(p + 192))));
  }

  static Numbers numbers(const char* p, std::int64_t part) {
    const __m512i nibbles = _mm512_loadu_si512(p + 64 * part);
    const __m512i shift = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
    const __m512i turn = quarters(4, 2, 0, 30);  // bits 2 i and 2 i + 1 to bits 4 and 5
    const char* high = p + 128 + 32 * part;
    const __m512i first = _mm512_srlv_epi64(_mm512_shuffle_i64x2(nibbles, nibbles, 0x88), shift);
    const __m512i second = _mm512_srlv_epi64(_mm512_shuffle_i64x2(nibbles, nibbles, 0xdd), shift);
    return {with_high(low_bits(first, 4), high, turn, 48), with_high(low_bits(second, 4), high + 16, turn, 48)};
  }
};

struct GgmlTQ2 : GgmlSimd {
  static constexpr DType kDType = DType::kTQ2;

  static Pairs pairs(const char* p) { return set1(half(p + 64)); }

  // The bits 2 i and 2 i + 1 of 16 bytes for each quarter i.
  static __m512i number(const char* p) {
    return low_bits(_mm512_srlv_epi32(_mm512_broadcast_i32x4(load16(p)), quarters(0, 2, 4, 6)), 2);
  }
  static Numbers numbers(const char* p, std::int64_t part) {
    return {number(p + 32 * part), number(p + 32 * part + 16)};
  }

  using Fields = __m512i;
  static Fields fields(const char* p) { return _mm512_cvtepu8_epi32(load16(p)); }
  template <int kS>
  static Float ternary(Fields v) {  // vpermps reads four bits of a lane
    const Float table = _mm512_set_ps(2, 1, 0, -1, 2, 1, 0, -1, 2, 1, 0, -1, 2, 1, 0, -1);
    return _mm512_permutexvar_ps(kS == 0 ? v : _mm512_srli_epi32(v, 2 * kS), table);
  }
};

}  // namespace
}  // namespace pi2::avx512
