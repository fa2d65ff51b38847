#include "kernels/avx2/impl.h"

void pi2::axpy_f16__avx2(PI2_AXPY_ARGS) { avx2::axpy<avx2::F16>(y, rows, h, count, n, next); }
