#include "kernels/neon/impl.h"
#include "kernels/q8.h"

void pi2::dot_q8__neon(PI2_DOT_ARGS) { Q8<neon::Simd>::dot(rows, count, x_T, tokens, n, out_RT, next, next_bytes); }
