#include "kernels/scalar/quantized.h"

void pi2::axpy_q4__scalar(PI2_AXPY_ARGS) { scalar::axpy_quantized<scalar::Q4>(y, rows, h, count, n, next); }
