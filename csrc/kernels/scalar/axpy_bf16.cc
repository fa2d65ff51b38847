#include "kernels/scalar/impl.h"

void pi2::axpy_bf16__scalar(PI2_AXPY_ARGS) { scalar::axpy<BF16>(y, rows, h, count, n, next); }
