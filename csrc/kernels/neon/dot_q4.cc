#include "kernels/neon/impl.h"
#include "kernels/q4.h"

void pi2::dot_q4__neon(PI2_DOT_ARGS) { Q4<neon::Simd>::dot(rows, count, x_T, tokens, n, out_RT, next, next_bytes); }
