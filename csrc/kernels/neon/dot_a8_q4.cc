#include "kernels/neon/a8.h"

void pi2::dot_a8_q4__neon(PI2_DOT_ARGS) {
  neon::dot_a8<neon::Q4Bytes, neon::WideningProducts>(rows, count, x_T, tokens, n, out_RT, next, next_bytes);
}
