#include "kernels/neon_dotprod/impl.h"

void pi2::dot_a8_q4__neon_dotprod(PI2_DOT_ARGS) {
  neon::dot_a8<neon::Q4Bytes, neon::DotProducts>(rows, count, x_T, tokens, n, out_RT, next, next_bytes);
}
