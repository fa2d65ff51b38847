#include "kernels/scalar/impl.h"

void pi2::axpy_f32__scalar(PI2_AXPY_ARGS) { scalar::axpy<F32>(y, rows, h, count, n, next); }
