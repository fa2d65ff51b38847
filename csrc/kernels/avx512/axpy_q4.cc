#include "kernels/avx512/quantized.h"

void pi2::axpy_q4__avx512(PI2_AXPY_ARGS) { avx512::axpy_q4(y, rows, h, count, n, next); }
