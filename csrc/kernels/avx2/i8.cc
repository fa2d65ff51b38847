#include "kernels/attention.h"
#include "kernels/avx2/impl.h"

void pi2::dot_i8__avx2(PI2_DOT_ARGS) { avx2::dot<avx2::I8>(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::attend_i8__avx2(PI2_ATTEND_ARGS) { attend<avx2::I8, 2>(a); }
