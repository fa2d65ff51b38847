#include "kernels/neon/impl.h"
#include "kernels/q4.h"

void pi2::restore_q4__neon(PI2_RESTORE_ARGS) { Q4<neon::Simd>::restore(y, n, out); }
