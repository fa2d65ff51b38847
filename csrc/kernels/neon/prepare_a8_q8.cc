#include "kernels/neon/a8.h"

void pi2::prepare_a8_q8__neon(PI2_PREPARE_ARGS) { neon::prepare_a8(x, n, out); }
