#include "kernels/neon/impl.h"
#include "kernels/q4.h"

void pi2::axpy_q4__neon(PI2_AXPY_ARGS) { Q4<neon::Simd>::axpy(y, rows, h, count, n, next); }
