#include "kernels/neon_dotprod/blocks.h"
#include "kernels/neon_dotprod/impl.h"

void pi2::dot_a8_q4__neon_dotprod(PI2_DOT_ARGS) {
  neon::dot_a8<neon::Q4Bytes, neon::DotProducts>(rows, count, x_T, tokens, n, out_RT, next);
}

void pi2::prepare_gemm_q4__neon_dotprod(PI2_PREPARE_ARGS) { Blocks<neon::BlockQ4>::prepare(x, n, out); }

void pi2::dot_blocks_q4__neon_dotprod(PI2_DOT_BLOCKS_ARGS) {
  Blocks<neon::BlockQ4>::dot(blocks, count, x_T, tokens, n, out, ldo);
}
