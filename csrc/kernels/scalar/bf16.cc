#include "kernels/attention.h"
#include "kernels/scalar/impl.h"
#include "kernels/scalar/vectors.h"

void pi2::dot_bf16__scalar(PI2_DOT_ARGS) { scalar::dot<BF16>(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::axpy_bf16__scalar(PI2_AXPY_ARGS) { scalar::axpy<BF16>(y, rows, h, count, n, next); }

void pi2::attend_bf16__scalar(PI2_ATTEND_ARGS) { attend<scalar::Vectors<BF16>, 2>(a); }
