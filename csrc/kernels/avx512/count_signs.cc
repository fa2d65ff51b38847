#include <immintrin.h>

#include "kernels/fetch_rows.h"
#include "pi2/kernels.h"

namespace {

// Ones in each half byte by table, as on AVX2: the population count instruction is a separate feature
// (AVX512_VPOPCNTDQ), and this is already faster than memory.
__m512i ones_by_word(__m512i bits) {
  const __m512i ones = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
  const __m512i low = _mm512_set1_epi8(15);
  const __m512i bytes = _mm512_add_epi8(_mm512_shuffle_epi8(ones, _mm512_and_si512(bits, low)),
                                        _mm512_shuffle_epi8(ones, _mm512_and_si512(_mm512_srli_epi16(bits, 4), low)));
  return _mm512_sad_epu8(bytes, _mm512_setzero_si512());
}

}  // namespace

void pi2::count_signs__avx512(PI2_SIGNS_ARGS) {
  constexpr std::int64_t kAhead = 4096;  // bytes; as in read.cc
  const char* row = static_cast<const char*>(rows);
  const char* v = static_cast<const char*>(x);
  for (std::int64_t r = 0; r < count; ++r, row += 8 * words) {
    __m512i sum = _mm512_setzero_si512();
    std::int64_t k = 0;
    for (; k + 8 <= words; k += 8) {
      pi2::fetch(row + 8 * k + kAhead);
      sum = _mm512_add_epi64(
          sum, ones_by_word(_mm512_xor_si512(_mm512_loadu_si512(row + 8 * k), _mm512_loadu_si512(v + 8 * k))));
    }
    if (k < words) {
      const auto mask = static_cast<__mmask8>((1 << (words - k)) - 1);
      sum = _mm512_add_epi64(sum, ones_by_word(_mm512_xor_si512(_mm512_maskz_loadu_epi64(mask, row + 8 * k),
                                                                _mm512_maskz_loadu_epi64(mask, v + 8 * k))));
    }
    out[r] = static_cast<std::int32_t>(_mm512_reduce_add_epi64(sum));
  }
}
