#include "kernels/neon_i8mm/blocks.h"
#include "kernels/neon_i8mm/impl.h"

void pi2::dot_a8_q8__neon_i8mm(PI2_DOT_ARGS) {
  neon::dot_a8_matrix<neon::Q8Bytes>(rows, count, x_T, tokens, n, out_RT, next);
}

void pi2::prepare_gemm_q8__neon_i8mm(PI2_PREPARE_ARGS) {
  Blocks<neon::BlockQ8<neon::UnsignedProducts>>::prepare(x, n, out);
}

void pi2::dot_blocks_q8__neon_i8mm(PI2_DOT_BLOCKS_ARGS) {
  Blocks<neon::BlockQ8<neon::UnsignedProducts>>::dot(blocks, count, x_T, tokens, n, out, ldo);
}
