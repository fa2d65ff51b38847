#include "kernels/q4.h"
#include "kernels/attention.h"
#include "kernels/avx2/a8.h"
#include "kernels/avx2/blocks.h"
#include "kernels/avx2/impl.h"

void pi2::dot_q4__avx2(PI2_DOT_ARGS) { Q4<avx2::Simd>::dot(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::axpy_q4__avx2(PI2_AXPY_ARGS) { Q4<avx2::Simd>::axpy(y, rows, h, count, n, next); }

void pi2::prepare_q4__avx2(PI2_PREPARE_ARGS) { Q4<avx2::Simd>::prepare(x, n, out); }

void pi2::restore_q4__avx2(PI2_RESTORE_ARGS) { Q4<avx2::Simd>::restore(y, n, out); }

void pi2::dot_a8_q4__avx2(PI2_DOT_ARGS) { avx2::dot_a8_q4(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::prepare_a8_q4__avx2(PI2_PREPARE_ARGS) { avx2::prepare_a8_q4(x, n, out); }

void pi2::prepare_gemm_q4__avx2(PI2_PREPARE_ARGS) { Blocks<avx2::BlockQ4>::prepare(x, n, out); }

void pi2::dot_blocks_q4__avx2(PI2_DOT_BLOCKS_ARGS) {
  Blocks<avx2::BlockQ4>::dot(blocks, count, x_T, tokens, n, out, ldo);
}

void pi2::attend_q4__avx2(PI2_ATTEND_ARGS) { attend_q4<avx2::F32, 2>(a); }
