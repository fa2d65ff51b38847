#include <immintrin.h>

#include <cstring>

#include "pi2/kernels.h"

void pi2::count_signs__avx2(PI2_SIGNS_ARGS) {
  // Ones in each half byte by table, then sums of eight bytes: four times the words per instruction of popcnt.
  const __m256i ones = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4,  //
                                        0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
  const __m256i low = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
  const char* row = static_cast<const char*>(rows);
  const char* v = static_cast<const char*>(x);
  for (std::int64_t r = 0; r < count; ++r, row += 8 * words) {
    __m256i sum = zero;
    std::int64_t k = 0;
    for (; k + 4 <= words; k += 4) {
      const __m256i bits = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 8 * k)),
                                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + 8 * k)));
      const __m256i bytes =
          _mm256_add_epi8(_mm256_shuffle_epi8(ones, _mm256_and_si256(bits, low)),
                          _mm256_shuffle_epi8(ones, _mm256_and_si256(_mm256_srli_epi16(bits, 4), low)));
      sum = _mm256_add_epi64(sum, _mm256_sad_epu8(bytes, zero));
    }
    alignas(32) std::int64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum);
    std::int64_t total = lanes[0] + lanes[1] + lanes[2] + lanes[3];
    for (; k < words; ++k) {
      std::uint64_t a, b;
      std::memcpy(&a, row + 8 * k, sizeof(a));
      std::memcpy(&b, v + 8 * k, sizeof(b));
      total += __builtin_popcountll(a ^ b);
    }
    out[r] = static_cast<std::int32_t>(total);
  }
}
