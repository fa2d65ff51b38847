#include "kernels/avx512/quantized.h"

void pi2::restore_q4__avx512(PI2_RESTORE_ARGS) { avx512::restore_q4(y, n, out); }
