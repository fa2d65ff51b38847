#include "kernels/neon/a8.h"

void pi2::dot_a8_q8__neon(PI2_DOT_ARGS) {
  neon::dot_a8<neon::Q8Bytes, neon::WideningProducts>(rows, count, x_T, tokens, n, out_RT, next, next_bytes);
}
