#include "kernels/neon/impl.h"
#include "kernels/q8.h"

void pi2::axpy_q8__neon(PI2_AXPY_ARGS) { Q8<neon::Simd>::axpy(y, rows, h, count, n, next); }
