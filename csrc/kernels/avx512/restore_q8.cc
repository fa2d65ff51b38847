#include "kernels/avx512/quantized.h"

void pi2::restore_q8__avx512(PI2_RESTORE_ARGS) { avx512::restore_q8(y, n, out); }
