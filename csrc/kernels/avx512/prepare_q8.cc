#include "kernels/avx512/quantized.h"

void pi2::prepare_q8__avx512(PI2_PREPARE_ARGS) { avx512::prepare_q8(x, n, out); }
