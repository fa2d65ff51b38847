#include "kernels/attention.h"
#include "kernels/avx512/impl.h"

void pi2::dot_i8__avx512(PI2_DOT_ARGS) { avx512::dot<avx512::I8>(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::attend_i8__avx512(PI2_ATTEND_ARGS) { attend<avx512::I8, 4>(a); }
