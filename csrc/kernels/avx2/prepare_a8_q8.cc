#include "kernels/avx2/a8.h"

void pi2::prepare_a8_q8__avx2(PI2_PREPARE_ARGS) { avx2::prepare_a8_q8(x, n, out); }
