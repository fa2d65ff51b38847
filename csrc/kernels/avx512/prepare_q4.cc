#include "kernels/avx512/quantized.h"

void pi2::prepare_q4__avx512(PI2_PREPARE_ARGS) { avx512::prepare_q4(x, n, out); }
