#include "kernels/avx2/a8.h"

void pi2::dot_a8_q4__avx2(PI2_DOT_ARGS) { avx2::dot_a8_q4(rows, count, x_T, tokens, n, out_RT, next, next_bytes); }
