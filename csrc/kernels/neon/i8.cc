#include "kernels/attention.h"
#include "kernels/neon/impl.h"

void pi2::dot_i8__neon(PI2_DOT_ARGS) { dot_plain<neon::I8, 4, 2>(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::attend_i8__neon(PI2_ATTEND_ARGS) { attend<neon::I8, 4>(a); }
