#include "kernels/neon/impl.h"
#include "kernels/q4.h"

void pi2::prepare_q4__neon(PI2_PREPARE_ARGS) { Q4<neon::Simd>::prepare(x, n, out); }
