#include "kernels/neon/impl.h"

void pi2::axpy_f32__neon(PI2_AXPY_ARGS) { axpy_plain<neon::F32>(y, rows, h, count, n, next); }
