#include "kernels/avx512/ggml.h"

#define PI2_FORMAT(dtype, Format)                                             \
  void pi2::dot_##dtype##__avx512(PI2_DOT_ARGS) {                             \
    GgmlRows<avx512::Format>::dot(rows, count, x_T, tokens, n, out_RT, next); \
  }

PI2_FORMAT(q4_1, GgmlSmall<DType::kQ4_1>)
PI2_FORMAT(q5_0, GgmlSmall<DType::kQ5_0>)
PI2_FORMAT(q5_1, GgmlSmall<DType::kQ5_1>)
PI2_FORMAT(q4_k, GgmlK<DType::kQ4K>)
PI2_FORMAT(q5_k, GgmlK<DType::kQ5K>)
PI2_FORMAT(q6_k, GgmlQ6K)
PI2_FORMAT(tq2_0, GgmlTQ2)

void pi2::axpy_tq2_0__avx512(PI2_AXPY_ARGS) { TernaryRows<avx512::GgmlTQ2>::axpy(y, rows, h, count, n, next); }
