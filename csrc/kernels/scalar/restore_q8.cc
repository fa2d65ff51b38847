#include "kernels/scalar/quantized.h"

void pi2::restore_q8__scalar(PI2_RESTORE_ARGS) { scalar::restore(y, n, out); }
