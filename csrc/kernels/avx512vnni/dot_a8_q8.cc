#include "kernels/avx512vnni/impl.h"

void pi2::dot_a8_q8__avx512vnni(PI2_DOT_ARGS) {
  avx512vnni::dot_a8_q8(rows, count, x_T, tokens, n, out_RT, next, next_bytes);
}
