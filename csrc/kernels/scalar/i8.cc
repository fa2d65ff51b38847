#include "kernels/scalar/impl.h"

void pi2::dot_i8__scalar(PI2_DOT_ARGS) { scalar::dot<I8>(rows, count, x_T, tokens, n, out_RT, next); }
