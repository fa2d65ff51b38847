#include "kernels/avx512/impl.h"

void pi2::axpy_bf16__avx512(PI2_AXPY_ARGS) { avx512::axpy<avx512::BF16>(y, rows, h, count, n, next); }
