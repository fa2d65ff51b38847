#include "kernels/attention.h"
#include "kernels/avx2/impl.h"

void pi2::dot_f16__avx2(PI2_DOT_ARGS) { avx2::dot<avx2::F16>(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::axpy_f16__avx2(PI2_AXPY_ARGS) { avx2::axpy<avx2::F16>(y, rows, h, count, n, next); }

void pi2::attend_f16__avx2(PI2_ATTEND_ARGS) { attend<avx2::F16, 2>(a); }
