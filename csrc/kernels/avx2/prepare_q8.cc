#include "kernels/avx2/impl.h"
#include "kernels/q8.h"

void pi2::prepare_q8__avx2(PI2_PREPARE_ARGS) { Q8<avx2::Simd>::prepare(x, n, out); }
