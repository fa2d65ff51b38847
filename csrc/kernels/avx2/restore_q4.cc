#include "kernels/avx2/impl.h"
#include "kernels/q4.h"

void pi2::restore_q4__avx2(PI2_RESTORE_ARGS) { Q4<avx2::Simd>::restore(y, n, out); }
