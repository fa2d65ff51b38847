#include "kernels/avx512/quantized.h"

void pi2::dot_q8__avx512(PI2_DOT_ARGS) { avx512::dot_q8(rows, count, x_T, tokens, n, out_RT, next, next_bytes); }
