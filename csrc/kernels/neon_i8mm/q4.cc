#include "kernels/neon_i8mm/impl.h"

void pi2::dot_a8_q4__neon_i8mm(PI2_DOT_ARGS) {
  neon::dot_a8_matrix<neon::Q4Bytes>(rows, count, x_T, tokens, n, out_RT, next);
}
