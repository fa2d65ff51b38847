#include "kernels/scalar/quantized.h"

void pi2::dot_q8__scalar(PI2_DOT_ARGS) {
  scalar::dot_quantized<scalar::Q8>(rows, count, x_T, tokens, n, out_RT, next, next_bytes);
}
