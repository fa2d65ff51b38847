#include "kernels/neon/ggml.h"

#define PI2_FORMAT(dtype, Format)                                            \
  void pi2::dot_##dtype##__neon(PI2_DOT_ARGS) {                              \
    GgmlRows<neon::Format>::dot(rows, count, x_T, tokens, n, out_RT, next);  \
  }                                                                          \
  void pi2::dot_a8_##dtype##__neon(PI2_DOT_ARGS) {                           \
    using Rows = GgmlRows<neon::Ggml<neon::Format, neon::WideningProducts>>; \
    Rows::dot_a8(rows, count, x_T, tokens, n, out_RT, next);                 \
  }                                                                          \
  void pi2::prepare_a8_##dtype##__neon(PI2_PREPARE_ARGS) {                   \
    ggml_prepare_a8<neon::quantize_group, neon::Format::kDType>(x, n, out);  \
  }

PI2_FORMAT(q4_1, GgmlSmall<DType::kQ4_1>)
PI2_FORMAT(q5_0, GgmlSmall<DType::kQ5_0>)
PI2_FORMAT(q5_1, GgmlSmall<DType::kQ5_1>)
PI2_FORMAT(q4_k, GgmlK<DType::kQ4K>)
PI2_FORMAT(q5_k, GgmlK<DType::kQ5K>)
PI2_FORMAT(q6_k, GgmlQ6K)
PI2_FORMAT(tq2_0, GgmlTQ2)

void pi2::axpy_tq2_0__neon(PI2_AXPY_ARGS) { TernaryRows<neon::GgmlTQ2>::axpy(y, rows, h, count, n, next); }
