#include "kernels/scalar/quantized.h"

void pi2::prepare_q8__scalar(PI2_PREPARE_ARGS) { scalar::prepare(x, n, out); }
