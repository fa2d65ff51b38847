// ggml's blocks on AVX2 (kernels/ggml.h). A vector of numbers has 16 of two groups each; a pair of products of those is
// at most 2 * 63 * 127, and two such sums fit into 16 bits.
#pragma once

#include "kernels/avx2/a8.h"
#include "kernels/ggml.h"

namespace pi2::avx2 {
namespace {

// kGroups: of a step.
template <std::int64_t kGroups>
struct GgmlSimd : Simd {
  // Of eight groups in scale[0] and offset[0]; of halves: the first four groups', then the others'.
  struct Scales {
    Float scale[2], offset[2];
  };
  // The groups 2 j and 2 j + 1 of a part.
  struct Numbers {
    Int first[2], second[2];
  };
  // Lanes 0 to 3 and 4 to 7 are a group each of the two.
  struct Sums {
    Float groups[2];
  };

  static Float bytes(const char* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static Int both(const char* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Int low_bits(Int v, int bits) {
    return _mm256_and_si256(v, _mm256_set1_epi8(static_cast<char>((1 << bits) - 1)));
  }
  // Every lane of 128 bits shifted by a number of bits of its own; bits of other bytes come in, and have to go.
  static Int shifted(Int v, int low, int high) {
    return _mm256_srlv_epi32(v, _mm256_set_epi32(high, high, high, high, low, low, low, low));
  }

  // `low` of four bits and so many more of `high`.
  static Int with_high(Int low, Int high, int bits) {
    return _mm256_or_si256(low, _mm256_slli_epi16(low_bits(high, bits), 4));
  }
  static Int two(const char* low, const char* high) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low))),
                                   _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
  }

  static void store(const Scales& scales, float* scale, float* offset) {
    for (int j = 0; j < 2; ++j) {
      _mm256_store_ps(scale + 8 * j, scales.scale[j]);
      _mm256_store_ps(offset + 8 * j, scales.offset[j]);
    }
  }
  static void store(const Numbers& numbers, char* out) {
    for (int j = 0; j < 2; ++j) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + 32 * j), numbers.first[j]);
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + 64 + 32 * j), numbers.second[j]);
    }
  }

  static Sums zero_sums() { return {{zero(), zero()}}; }
  static float total(const Sums& sums) { return reduce(add(sums.groups[0], sums.groups[1])); }

  static Float products(Int a, const std::int8_t* x, Int b, const std::int8_t* y) {
    return _mm256_cvtepi32_ps(
        pairs(_mm256_add_epi16(_mm256_maddubs_epi16(a, load_bytes(x)), _mm256_maddubs_epi16(b, load_bytes(y)))));
  }
  static Float products(Int a, const std::int8_t* x) {
    return _mm256_cvtepi32_ps(pairs(_mm256_maddubs_epi16(a, load_bytes(x))));
  }
  // Number i and number j of v, over four lanes each.
  static Float spread(Float v, int i, int j) {
    return _mm256_permutevar8x32_ps(v, _mm256_set_epi32(j, j, j, j, i, i, i, i));
  }

  // One for each group of a step, and zeros.
  static Float load_step(const float* p) {
    if constexpr (kGroups == 8) return load_floats(p);
    return _mm256_zextps128_ps256(_mm_loadu_ps(p));
  }

  static void add_offsets(Sums* sums, const Scales& scales, const GgmlInput<false>& x) {
    sums->groups[0] = fma(scales.offset[0], load_step(x.sum), sums->groups[0]);
  }
  static void add_products(Sums* sums, const Scales& scales, std::int64_t part, const Numbers& numbers,
                           const GgmlInput<false>& x) {
    const Float scale = mul(scales.scale[0], load_step(x.scale));
    const std::int8_t* values = x.values + part * kGgmlPart;
    for (int j = 0; j < 2; ++j) {
      const int g = static_cast<int>(4 * part) + 2 * j;
      sums->groups[j] =
          fma(spread(scale, g, g + 1),
              products(numbers.first[j], values + 32 * j, numbers.second[j], values + 64 + 32 * j), sums->groups[j]);
    }
  }

  static void add_offsets(Sums* sums, const Scales& scales, const GgmlInput<true>& x) {
    for (int j = 0; j < 2; ++j) sums->groups[j] = fma(scales.offset[j], load_floats(x.sum + 8 * j), sums->groups[j]);
  }
  static void add_products(Sums* sums, const Scales& scales, std::int64_t part, const Numbers& numbers,
                           const GgmlInput<true>& x) {
    const Float scale = mul(scales.scale[part], load_floats(x.scale + 8 * part));
    const std::int8_t* values = x.values + part * kGgmlPart;
    for (int j = 0; j < 2; ++j) {
      sums->groups[j] =
          fma(spread(scale, 4 * j, 4 * j + 2), products(numbers.first[j], values + 32 * j), sums->groups[j]);
      sums->groups[j] =
          fma(spread(scale, 4 * j + 1, 4 * j + 3), products(numbers.second[j], values + 64 + 32 * j), sums->groups[j]);
    }
  }
};

// A group to a block.
template <DType kType>
struct GgmlSmall : GgmlSimd<4> {
  static constexpr DType kDType = kType;
  static constexpr bool kHalves = false, kMin = kType != DType::kQ5_0, kFifth = kType != DType::kQ4_1;
  static constexpr std::int64_t kBytes = ggml_block(kType).bytes, kBits = kMin ? 4 : 2,
                                kNibbles = kBits + (kFifth ? 4 : 0);

  // The four bytes at p of four blocks.
  static __m128i words(const char* p) {
    std::int32_t w[4];
    for (int i = 0; i < 4; ++i) std::memcpy(w + i, p + i * kBytes, 4);
    return _mm_set_epi32(w[3], w[2], w[1], w[0]);
  }

  static Scales scales(const char* p) {
    const __m128i evens_and_odds = _mm_set_epi8(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0);
    const Float both = _mm256_cvtph_ps(_mm_shuffle_epi8(words(p), evens_and_odds));
    const __m128 scale = _mm256_castps256_ps128(both);
    const __m128 offset = kMin ? _mm256_extractf128_ps(both, 1) : _mm_mul_ps(scale, _mm_set1_ps(-16));
    return {{_mm256_zextps128_ps256(scale), zero()}, {_mm256_zextps128_ps256(offset), zero()}};
  }

  static Numbers numbers(const char* p, std::int64_t) {
    Numbers out;
    for (int j = 0; j < 2; ++j) {
      const char* block = p + 2 * j * kBytes;
      const Int nibbles = two(block + kNibbles, block + kBytes + kNibbles);
      out.first[j] = low_bits(nibbles, 4);
      out.second[j] = low_bits(_mm256_srli_epi16(nibbles, 4), 4);
      if constexpr (kFifth) {
        std::int32_t bits[2];
        for (int i = 0; i < 2; ++i) std::memcpy(bits + i, block + i * kBytes + kBits, 4);
        // Byte k of a group gets the byte that has bit k, of which that bit is kept.
        const Int all = _mm256_set_epi32(0, 0, 0, bits[1], 0, 0, 0, bits[0]);
        const Int which = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
        const Int five = _mm256_set1_epi8(16);
        for (int h = 0; h < 2; ++h) {
          const char a = static_cast<char>(2 * h), b = static_cast<char>(2 * h + 1);
          const Int bytes = _mm256_shuffle_epi8(all, _mm256_setr_epi8(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b, a,
                                                                      a, a, a, a, a, a, a, b, b, b, b, b, b, b, b));
          const Int set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, which), which);
          Int& to = h == 0 ? out.first[j] : out.second[j];
          to = _mm256_or_si256(to, _mm256_and_si256(set, five));
        }
      }
    }
    return out;
  }
};

// Eight floats of eight bytes.
inline __m256 floats_of(std::uint64_t bytes) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(bytes))));
}

template <DType kType>
struct GgmlK : GgmlSimd<8> {
  static constexpr DType kDType = kType;
  static constexpr bool kHalves = false, kFifth = kType == DType::kQ5K;

  static Scales scales(const char* p) {
    const KScales k(p + 4);
    return {{mul(set1(half(p)), floats_of(k.scale)), zero()}, {mul(set1(-half(p + 2)), floats_of(k.min)), zero()}};
  }

  static Numbers numbers(const char* p, std::int64_t part) {
    const char* nibbles = p + (kFifth ? 48 : 16) + 64 * part;
    Numbers out;
    for (int j = 0; j < 2; ++j) {
      out.first[j] = low_bits(shifted(both(nibbles + 32 * j), 0, 4), 4);
      out.second[j] = low_bits(shifted(both(nibbles + 32 * j + 16), 0, 4), 4);
      if constexpr (kFifth) {
        const int bit = static_cast<int>(4 * part) + 2 * j;
        out.first[j] = with_high(out.first[j], shifted(both(p + 16), bit, bit + 1), 1);
        out.second[j] = with_high(out.second[j], shifted(both(p + 32), bit, bit + 1), 1);
      }
    }
    return out;
  }
};

struct GgmlQ6K : GgmlSimd<8> {
  static constexpr DType kDType = DType::kQ6K;
  static constexpr bool kHalves = true;

  static Scales scales(const char* p) {
    const Float d = set1(half(p + 208)), centre = set1(-32);
    Scales out;
    for (int j = 0; j < 2; ++j) {
      const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 192 + 8 * j));
      out.scale[j] = mul(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)));
      out.offset[j] = mul(centre, out.scale[j]);
    }
    return out;
  }

  static Numbers numbers(const char* p, std::int64_t part) {
    const char *nibbles = p + 64 * part, *high = p + 128 + 32 * part;
    Numbers out;
    for (int j = 0; j < 2; ++j) {  // groups 0 and 1 are low halves, 2 and 3 high ones
      out.first[j] = number(nibbles, high, j);
      out.second[j] = number(nibbles + 16, high + 16, j);
    }
    return out;
  }

  static Int number(const char* nibbles, const char* high, int j) {
    const Int bytes = two(nibbles, nibbles + 32);
    return with_high(low_bits(j == 0 ? bytes : _mm256_srli_epi16(bytes, 4), 4), shifted(both(high), 4 * j, 4 * j + 2),
                     2);
  }
};

}  // namespace
}  // namespace pi2::avx2
