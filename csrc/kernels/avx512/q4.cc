#include "kernels/attention.h"
#include "kernels/avx512/quantized.h"

void pi2::dot_q4__avx512(PI2_DOT_ARGS) { avx512::dot_q4(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::axpy_q4__avx512(PI2_AXPY_ARGS) { avx512::axpy_q4(y, rows, h, count, n, next); }

void pi2::prepare_q4__avx512(PI2_PREPARE_ARGS) { avx512::prepare_q4(x, n, out); }

void pi2::restore_q4__avx512(PI2_RESTORE_ARGS) { avx512::restore_q4(y, n, out); }

void pi2::attend_q4__avx512(PI2_ATTEND_ARGS) { attend_q4<avx512::F32, 4, avx512::Group>(a); }
