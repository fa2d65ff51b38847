#include <arm_neon.h>

#include "pi2/kernels.h"

std::uint64_t pi2::read__neon(PI2_READ_ARGS) {
  const auto* p = static_cast<const std::uint8_t*>(data);
  uint64x2_t sum[4] = {vdupq_n_u64(0), vdupq_n_u64(0), vdupq_n_u64(0), vdupq_n_u64(0)};
  std::int64_t k = 0;
  for (; k + 64 <= bytes; k += 64) {
    for (int j = 0; j < 4; ++j) sum[j] = vaddq_u64(sum[j], vreinterpretq_u64_u8(vld1q_u8(p + k + 16 * j)));
  }
  const uint64x2_t all = vaddq_u64(vaddq_u64(sum[0], sum[1]), vaddq_u64(sum[2], sum[3]));
  return vaddvq_u64(all) + read__scalar(p + k, bytes - k);
}
