#include "kernels/avx2/impl.h"
#include "kernels/q8.h"

void pi2::restore_q8__avx2(PI2_RESTORE_ARGS) { Q8<avx2::Simd>::restore(y, n, out); }
