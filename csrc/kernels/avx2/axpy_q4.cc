#include "kernels/avx2/impl.h"
#include "kernels/q4.h"

void pi2::axpy_q4__avx2(PI2_AXPY_ARGS) { Q4<avx2::Simd>::axpy(y, rows, h, count, n, next); }
