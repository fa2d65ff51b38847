#include "kernels/avx512vnni/impl.h"

void pi2::prepare_a8_q4__avx512vnni(PI2_PREPARE_ARGS) { avx512vnni::prepare_a8_q4(x, n, out); }
