#include "kernels/neon/impl.h"

void pi2::axpy_f16__neon(PI2_AXPY_ARGS) { axpy_plain<neon::F16>(y, rows, h, count, n, next); }
