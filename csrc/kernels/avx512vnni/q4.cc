#include "kernels/avx512vnni/blocks.h"
#include "kernels/avx512vnni/impl.h"
#include "kernels/avx512vnni/lanes.h"

void pi2::dot_a8_q4__avx512vnni(PI2_DOT_ARGS) { avx512vnni::dot_a8_q4(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::prepare_a8_q4__avx512vnni(PI2_PREPARE_ARGS) { avx512vnni::prepare_a8_q4(x, n, out); }

void pi2::prepare_gemm_q4__avx512vnni(PI2_PREPARE_ARGS) { avx512vnni::prepare_gemm(x, n, out, 8); }

void pi2::panel_q4__avx512vnni(PI2_PANEL_ARGS) { avx512vnni::panel_q4(rows, n, panel); }

void pi2::gemm_q4__avx512vnni(PI2_GEMM_ARGS) {
  avx512vnni::gemm<avx512vnni::PanelOf::kScales>(panels, panel_count, x_T, tokens, n, out, ldo);
}

void pi2::dot_blocks_q4__avx512vnni(PI2_DOT_BLOCKS_ARGS) {
  avx512vnni::dot_blocks<avx512vnni::BlockQ4>(blocks, count, x_T, tokens, n, out, ldo);
}

void pi2::dot_lanes_q4__avx512vnni(PI2_DOT_LANES_ARGS) {
  for (; tokens >= 2; tokens -= 2, x_T += 2, out += 2 * ldo, next = nullptr)
    avx512vnni::dot_lanes_q4_of<2>(rows, next, x_T, n, out, ldo);
  if (tokens == 1) avx512vnni::dot_lanes_q4_of<1>(rows, next, x_T, n, out, ldo);
}
