#include "kernels/avx2/impl.h"
#include "kernels/q4.h"

void pi2::dot_q4__avx2(PI2_DOT_ARGS) { Q4<avx2::Simd>::dot(rows, count, x_T, tokens, n, out_RT, next, next_bytes); }
