#include "kernels/scalar/quantized.h"

void pi2::axpy_q8__scalar(PI2_AXPY_ARGS) { scalar::axpy_quantized<scalar::Q8>(y, rows, h, count, n, next); }
