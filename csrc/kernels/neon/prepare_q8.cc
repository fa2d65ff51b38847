#include "kernels/neon/impl.h"
#include "kernels/q8.h"

void pi2::prepare_q8__neon(PI2_PREPARE_ARGS) { Q8<neon::Simd>::prepare(x, n, out); }
