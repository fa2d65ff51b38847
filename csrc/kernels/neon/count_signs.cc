#include <arm_neon.h>

#include "pi2/kernels.h"

void pi2::count_signs__neon(PI2_SIGNS_ARGS) {
  const auto* row = static_cast<const std::uint8_t*>(rows);
  const auto* v = static_cast<const std::uint8_t*>(x);
  for (std::int64_t r = 0; r < count; ++r, row += 8 * words) {
    uint32x4_t sum = vdupq_n_u32(0);
    std::int64_t k = 0;
    for (; k + 2 <= words; k += 2)
      sum = vpadalq_u16(sum, vpaddlq_u8(vcntq_u8(veorq_u8(vld1q_u8(row + 8 * k), vld1q_u8(v + 8 * k)))));
    std::uint32_t total = vaddvq_u32(sum);
    if (k < words) total += vaddv_u8(vcnt_u8(veor_u8(vld1_u8(row + 8 * k), vld1_u8(v + 8 * k))));
    out[r] = static_cast<std::int32_t>(total);
  }
}
