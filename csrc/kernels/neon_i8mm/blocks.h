// Products of unsigned weights as they are, by USDOT: nothing to do before.
#pragma once

#include "kernels/neon_dotprod/blocks.h"

namespace pi2::neon {
namespace {

struct UnsignedProducts {
  static constexpr std::int32_t kOffset = 128;
  static uint8x16_t values(uint8x16_t v) { return v; }
  template <int kLane>
  static int32x4_t dot(int32x4_t sum, uint8x16_t w, int8x16_t x) {
    return vusdotq_laneq_s32(sum, w, x, kLane);
  }
};

}  // namespace
}  // namespace pi2::neon
