#include "kernels/avx512vnni/impl.h"

void pi2::prepare_a8_q8__avx512vnni(PI2_PREPARE_ARGS) { avx512vnni::prepare_a8_q8(x, n, out); }
