#include "kernels/scalar/quantized.h"

void pi2::prepare_q4__scalar(PI2_PREPARE_ARGS) { scalar::prepare(x, n, out); }
