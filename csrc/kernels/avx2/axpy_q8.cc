#include "kernels/avx2/impl.h"
#include "kernels/q8.h"

void pi2::axpy_q8__avx2(PI2_AXPY_ARGS) { Q8<avx2::Simd>::axpy(y, rows, h, count, n, next); }
