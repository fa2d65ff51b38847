#include "kernels/attention.h"
#include "kernels/scalar/quantized.h"
#include "kernels/scalar/vectors.h"

void pi2::dot_q4__scalar(PI2_DOT_ARGS) { scalar::dot_quantized<scalar::Q4>(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::axpy_q4__scalar(PI2_AXPY_ARGS) { scalar::axpy_quantized<scalar::Q4>(y, rows, h, count, n, next); }

void pi2::prepare_q4__scalar(PI2_PREPARE_ARGS) { scalar::prepare(x, n, out); }

void pi2::restore_q4__scalar(PI2_RESTORE_ARGS) { scalar::restore(y, n, out); }

void pi2::dot_a8_q4__scalar(PI2_DOT_ARGS) { scalar::dot_a8<scalar::Q4>(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::prepare_a8_q4__scalar(PI2_PREPARE_ARGS) { scalar::prepare_a8(x, n, out); }

void pi2::attend_q4__scalar(PI2_ATTEND_ARGS) { attend_q4<scalar::Vectors<F32>, 2>(a); }
