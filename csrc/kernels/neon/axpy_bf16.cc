#include "kernels/neon/impl.h"

void pi2::axpy_bf16__neon(PI2_AXPY_ARGS) { axpy_plain<neon::BF16>(y, rows, h, count, n, next); }
