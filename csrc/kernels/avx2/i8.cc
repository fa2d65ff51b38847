#include "kernels/avx2/impl.h"

void pi2::dot_i8__avx2(PI2_DOT_ARGS) { avx2::dot<avx2::I8>(rows, count, x_T, tokens, n, out_RT, next); }
