#include <immintrin.h>

#include "pi2/kernels.h"

std::uint64_t pi2::read__avx2(PI2_READ_ARGS) {
  const char* p = static_cast<const char*>(data);
  __m256i sum[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  std::int64_t k = 0;
  for (; k + 128 <= bytes; k += 128) {
    for (int j = 0; j < 4; ++j)
      sum[j] = _mm256_add_epi64(sum[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + k + 32 * j)));
  }
  alignas(32) std::uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes),
                     _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3])));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3] + read__scalar(p + k, bytes - k);
}
