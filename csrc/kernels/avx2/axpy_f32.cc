#include "kernels/avx2/impl.h"

void pi2::axpy_f32__avx2(PI2_AXPY_ARGS) { avx2::axpy<avx2::F32>(y, rows, h, count, n, next); }
