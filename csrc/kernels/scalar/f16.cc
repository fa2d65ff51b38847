#include "kernels/scalar/impl.h"

void pi2::dot_f16__scalar(PI2_DOT_ARGS) { scalar::dot<F16>(rows, count, x_T, tokens, n, out_RT, next, next_bytes); }

void pi2::axpy_f16__scalar(PI2_AXPY_ARGS) { scalar::axpy<F16>(y, rows, h, count, n, next); }
