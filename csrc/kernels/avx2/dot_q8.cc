#include "kernels/avx2/impl.h"
#include "kernels/q8.h"

void pi2::dot_q8__avx2(PI2_DOT_ARGS) { Q8<avx2::Simd>::dot(rows, count, x_T, tokens, n, out_RT, next, next_bytes); }
