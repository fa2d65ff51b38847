#include "kernels/q4.h"
#include "kernels/attention.h"
#include "kernels/neon/a8.h"
#include "kernels/neon/impl.h"

void pi2::dot_q4__neon(PI2_DOT_ARGS) { Q4<neon::Simd>::dot(rows, count, x_T, tokens, n, out_RT, next); }

void pi2::axpy_q4__neon(PI2_AXPY_ARGS) { Q4<neon::Simd>::axpy(y, rows, h, count, n, next); }

void pi2::prepare_q4__neon(PI2_PREPARE_ARGS) { Q4<neon::Simd>::prepare(x, n, out); }

void pi2::restore_q4__neon(PI2_RESTORE_ARGS) { Q4<neon::Simd>::restore(y, n, out); }

void pi2::dot_a8_q4__neon(PI2_DOT_ARGS) {
  neon::dot_a8<neon::Q4Bytes, neon::WideningProducts>(rows, count, x_T, tokens, n, out_RT, next);
}

void pi2::prepare_a8_q4__neon(PI2_PREPARE_ARGS) { neon::prepare_a8(x, n, out); }

void pi2::attend_q4__neon(PI2_ATTEND_ARGS) { attend_q4<neon::F32, 4>(a); }
