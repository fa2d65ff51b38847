#include "kernels/avx512/quantized.h"

void pi2::axpy_q8__avx512(PI2_AXPY_ARGS) { avx512::axpy_q8(y, rows, h, count, n, next); }
