// Products of bytes by SDOT: sixteen in one instruction instead of eight.
#pragma once

#include "kernels/neon/a8.h"

namespace pi2::neon {
namespace {

struct DotProducts {
  static int32x4_t sum(int8x16_t w, int8x16_t x) { return vdotq_s32(vdupq_n_s32(0), w, x); }
  static int32x4_t sum(const Group& w, const Group& x) {
    return vdotq_s32(vdotq_s32(vdupq_n_s32(0), w.first, x.first), w.second, x.second);
  }
};

}  // namespace
}  // namespace pi2::neon
