#include "kernels/attention.h"
#include "kernels/neon/impl.h"

void pi2::dot_f16__neon(PI2_DOT_ARGS) { dot_plain<neon::F16, 4, 2>(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::axpy_f16__neon(PI2_AXPY_ARGS) { axpy_plain<neon::F16>(y, rows, h, count, n, next); }

void pi2::attend_f16__neon(PI2_ATTEND_ARGS) { attend<neon::F16, 4>(a); }
