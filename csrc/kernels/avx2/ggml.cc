#include "kernels/avx2/ggml.h"

#define PI2_FORMAT(dtype, Format)                                              \
  void pi2::dot_##dtype##__avx2(PI2_DOT_ARGS) {                                \
    GgmlRows<avx2::Format>::dot(rows, count, x_T, tokens, n, out_RT, next);    \
  }                                                                            \
  void pi2::dot_a8_##dtype##__avx2(PI2_DOT_ARGS) {                             \
    GgmlRows<avx2::Format>::dot_a8(rows, count, x_T, tokens, n, out_RT, next); \
  }                                                                            \
  void pi2::prepare_a8_##dtype##__avx2(PI2_PREPARE_ARGS) {                     \
    ggml_prepare_a8<avx2::quantize_group, avx2::Format::kDType>(x, n, out);    \
  }

PI2_FORMAT(q4_1, GgmlSmall<DType::kQ4_1>)
PI2_FORMAT(q5_0, GgmlSmall<DType::kQ5_0>)
PI2_FORMAT(q5_1, GgmlSmall<DType::kQ5_1>)
PI2_FORMAT(q4_k, GgmlK<DType::kQ4K>)
PI2_FORMAT(q5_k, GgmlK<DType::kQ5K>)
PI2_FORMAT(q6_k, GgmlQ6K)
PI2_FORMAT(tq2_0, GgmlTQ2)

void pi2::axpy_tq2_0__avx2(PI2_AXPY_ARGS) { TernaryRows<avx2::GgmlTQ2>::axpy(y, rows, h, count, n, next); }
