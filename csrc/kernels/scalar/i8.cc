#include "kernels/attention.h"
#include "kernels/scalar/impl.h"
#include "kernels/scalar/vectors.h"

void pi2::dot_i8__scalar(PI2_DOT_ARGS) { scalar::dot<I8>(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::attend_i8__scalar(PI2_ATTEND_ARGS) { attend<scalar::Vectors<I8>, 2>(a); }
