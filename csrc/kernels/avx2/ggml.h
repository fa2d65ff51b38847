// ggml's blocks on AVX2 (kernels/ggml.h). A vector of numbers has 16 of two groups each; a pair of products of those is
// at most 2 * 63 * 127, and two such sums fit into 16 bits.
#pragma once

#include "kernels/avx2/a8.h"
#include "kernels/ggml.h"

namespace pi2::avx2 {
namespace {

template <int kParts, bool kHalves = false>
struct GgmlSimd : Simd {
  // Of each part.
  struct Pairs {
    Float of[kParts];
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

  static void store(const Pairs& pairs, float* out) {
    for (int part = 0; part < kParts; ++part) _mm256_store_ps(out + 8 * part, pairs.of[part]);
  }
  static void store(const Numbers& numbers, char* out) {
    for (int j = 0; j < 2; ++j) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + 32 * j), numbers.first[j]);
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + 64 + 32 * j), numbers.second[j]);
    }
  }

  static Sums zero_sums() { return {{zero(), zero()}}; }
  static float total(const Sums& sums) { return reduce(add(sums.groups[0], sums.groups[1])); }

  // Number i and number i + 2 of v, over four lanes each.
  static Float spread(Float v, int i) {
    return _mm256_permutevar8x32_ps(v, _mm256_set_epi32(i + 2, i + 2, i + 2, i + 2, i, i, i, i));
  }
  static Float products(Int a, const std::int8_t* x) {
    return _mm256_cvtepi32_ps(pairs_of(_mm256_maddubs_epi16(a, load_bytes(x))));
  }
  static Float products(Int a, const std::int8_t* x, Int b, const std::int8_t* y) {
    return _mm256_cvtepi32_ps(
        pairs_of(_mm256_add_epi16(_mm256_maddubs_epi16(a, load_bytes(x)), _mm256_maddubs_epi16(b, load_bytes(y)))));
  }
  static Int pairs_of(Int v) { return avx2::pairs(v); }

  template <class Step>
  static void add_step(Sums* sums, const Step& step, const GgmlInput& x) {
    const auto& [pairs, numbers] = step;
    for (int part = 0; part < kParts; ++part) {
      const std::int8_t *first = x.values + part * kGgmlPart, *second = first + kGgmlPart / 2;
      const Float pair = mul(pairs.of[part], load_floats(x.pairs + 8 * part));
      Float& sum = sums->groups[part];
      sum = kHalves ? fma(pairs.of[part], load_floats(x.sums + 8 * part), sum)
                    : add(sum, _mm256_blend_ps(zero(), pair, 0xaa));
      for (int j = 0; j < 2; ++j, first += 32, second += 32) {
        const Int a = numbers[part].first[j], b = numbers[part].second[j];
        Float& to = sums->groups[j];
        if constexpr (kHalves) {
          to = fma(spread(pair, 4 * j), products(a, first), to);
          to = fma(spread(pair, 4 * j + 1), products(b, second), to);
        } else {
          to = fma(spread(pair, 4 * j), products(a, first, b, second), to);
        }
      }
    }
  }
};

// A group to a block.
template <DType kType>
struct GgmlSmall : GgmlSimd<1> {
  using Step = GgmlStep<GgmlSmall>;
  static constexpr DType kDType = kType;
  static constexpr bool kMin = kType != DType::kQ5_0, kFifth = kType != DType::kQ4_1;
  static constexpr std::int64_t kBytes = ggml_block(kType).bytes, kBits = kMin ? 4 : 2,
                                kNibbles = kBits + (kFifth ? 4 : 0);

  // The four bytes at p of four blocks.
  static __m128i words(const char* p) {
    std::int32_t w[4];
    for (int i = 0; i < 4; ++i) std::memcpy(w + i, p + i * kBytes, 4);
    return _mm_set_epi32(w[3], w[2], w[1], w[0]);
  }

  static Pairs pairs(const char* p) {
    const __m128i twice = _mm_set_epi8(13, 12, 13, 12, 9, 8, 9, 8, 5, 4, 5, 4, 1, 0, 1, 0);
    return {{_mm256_cvtph_ps(kMin ? words(p) : _mm_shuffle_epi8(words(p), twice))}};
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

template <DType kType>
struct GgmlK : GgmlSimd<2> {
  using Step = GgmlStep<GgmlK>;
  static constexpr DType kDType = kType;
  static constexpr bool kFifth = kType == DType::kQ5K;

  static Pairs pairs(const char* p) {
    const KScales k(p + 4);
    const __m128i bytes = _mm_unpacklo_epi8(_mm_cvtsi64_si128(static_cast<long long>(k.scale)),
                                            _mm_cvtsi64_si128(static_cast<long long>(k.min)));
    std::int32_t both;
    std::memcpy(&both, p, sizeof(both));
    const Float by = _mm256_cvtph_ps(_mm_set1_epi32(both));
    return {{mul(by, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))),
             mul(by, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))))}};
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

struct GgmlQ6K : GgmlSimd<2, true> {
  using Step = GgmlStep<GgmlQ6K>;
  static constexpr DType kDType = DType::kQ6K;

  static Pairs pairs(const char* p) {
    const Float d = set1(half(p + 208));
    Pairs out;
    for (int part = 0; part < 2; ++part) {
      const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 192 + 8 * part));
      out.of[part] = mul(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)));
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

struct GgmlTQ2 : GgmlSimd<2> {
  static constexpr DType kDType = DType::kTQ2;
  using Sums = Float;
  struct Step {
    Float d;
    Int parts[2];

    explicit Step(const char* p) : d(set1(half(p + 64))), parts{load_bytes(p), load_bytes(p + 32)} {}
  };

  static Pairs pairs(const char* p) {
    const Float d = set1(half(p + 64));
    return {{d, d}};
  }

  static Numbers numbers(const char* p, std::int64_t part) {
    const Int first = both(p + 32 * part), second = both(p + 32 * part + 16);
    Numbers out;
    for (int j = 0; j < 2; ++j) {
      out.first[j] = low_bits(shifted(first, 4 * j, 4 * j + 2), 2);
      out.second[j] = low_bits(shifted(second, 4 * j, 4 * j + 2), 2);
    }
    return out;
  }

  using Fields = Int;
  static Fields fields(const char* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  template <int kS>
  static Float ternary(Fields v) {  // vpermps reads three bits of a lane
    return _mm256_permutevar8x32_ps(_mm256_set_ps(2, 1, 0, -1, 2, 1, 0, -1), _mm256_srli_epi32(v, 2 * kS));
  }

  static Sums zero_sums() { return zero(); }
  static float total(Sums sums) { return reduce(sums); }

  static void add_step(Sums* sums, const Step& step, const GgmlInput& x) {
    Float sum[2];
    for (int part = 0; part < 2; ++part) {
      const float* by = x.pairs + 8 * part;
      sum[part] = _mm256_blend_ps(zero(), load_floats(by), 0xaa);
      for (int s = 0; s < 4; ++s) {
        const Int bits = _mm256_and_si256(s < 3 ? step.parts[part] : _mm256_srli_epi16(step.parts[part], 2),
                                          _mm256_set1_epi8(static_cast<char>(3 * tq2_times(s))));
        sum[part] = fma(set1(by[2 * s]), products(bits, x.values + 64 * s + 32 * part), sum[part]);
      }
    }
    *sums = fma(step.d, add(sum[0], sum[1]), *sums);
  }
};

}  // namespace
}  // namespace pi2::avx2
