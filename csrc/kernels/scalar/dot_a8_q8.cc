#include "kernels/scalar/quantized.h"

void pi2::dot_a8_q8__scalar(PI2_DOT_ARGS) {
  scalar::dot_a8<scalar::Q8>(rows, count, x_T, tokens, n, out_RT, next, next_bytes);
}
