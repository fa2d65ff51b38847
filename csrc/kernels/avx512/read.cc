#include <immintrin.h>

#include "pi2/kernels.h"

std::uint64_t pi2::read__avx512(PI2_READ_ARGS) {
  const char* p = static_cast<const char*>(data);
  __m512i sum[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  std::int64_t k = 0;
  for (; k + 256 <= bytes; k += 256) {
    for (int j = 0; j < 4; ++j) sum[j] = _mm512_add_epi64(sum[j], _mm512_loadu_si512(p + k + 64 * j));
  }
  const __m512i all = _mm512_add_epi64(_mm512_add_epi64(sum[0], sum[1]), _mm512_add_epi64(sum[2], sum[3]));
  alignas(64) std::uint64_t lanes[8];
  _mm512_store_si512(lanes, all);
  std::uint64_t total = read__scalar(p + k, bytes - k);
  for (const std::uint64_t lane : lanes) total += lane;  // unsigned: it may wrap
  return total;
}
