#include "kernels/scalar/impl.h"

void pi2::axpy_f16__scalar(PI2_AXPY_ARGS) { scalar::axpy<F16>(y, rows, h, count, n, next); }
