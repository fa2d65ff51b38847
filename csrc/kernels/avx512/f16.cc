#include "kernels/attention.h"
#include "kernels/avx512/impl.h"

void pi2::dot_f16__avx512(PI2_DOT_ARGS) { avx512::dot<avx512::F16>(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::axpy_f16__avx512(PI2_AXPY_ARGS) { avx512::axpy<avx512::F16>(y, rows, h, count, n, next); }

void pi2::attend_f16__avx512(PI2_ATTEND_ARGS) { attend<avx512::F16, 4>(a); }
