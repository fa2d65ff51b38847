#include "kernels/avx2/a8.h"

void pi2::dot_a8_q8__avx2(PI2_DOT_ARGS) { avx2::dot_a8_q8(rows, count, x_T, tokens, n, out_RT, next, next_bytes); }
