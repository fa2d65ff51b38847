#include "kernels/scalar/quantized.h"

void pi2::prepare_a8_q8__scalar(PI2_PREPARE_ARGS) { scalar::prepare_a8(x, n, out); }
