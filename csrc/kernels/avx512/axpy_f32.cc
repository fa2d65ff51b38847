#include "kernels/avx512/impl.h"

void pi2::axpy_f32__avx512(PI2_AXPY_ARGS) { avx512::axpy<avx512::F32>(y, rows, h, count, n, next); }
