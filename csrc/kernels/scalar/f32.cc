#include "kernels/attention.h"
#include "kernels/scalar/impl.h"
#include "kernels/scalar/vectors.h"

void pi2::dot_f32__scalar(PI2_DOT_ARGS) { scalar::dot<F32>(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::axpy_f32__scalar(PI2_AXPY_ARGS) { scalar::axpy<F32>(y, rows, h, count, n, next); }

void pi2::attend_f32__scalar(PI2_ATTEND_ARGS) { attend<scalar::Vectors<F32>, 2>(a); }
