#include "kernels/neon/impl.h"
#include "kernels/q8.h"

void pi2::restore_q8__neon(PI2_RESTORE_ARGS) { Q8<neon::Simd>::restore(y, n, out); }
