#include "kernels/avx2/impl.h"
#include "kernels/q4.h"

void pi2::prepare_q4__avx2(PI2_PREPARE_ARGS) { Q4<avx2::Simd>::prepare(x, n, out); }
