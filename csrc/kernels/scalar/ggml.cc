#include "kernels/scalar/ggml.h"

#define PI2_FORMAT(dtype, kDType)                                                                            \
  void pi2::dot_##dtype##__scalar(PI2_DOT_ARGS) {                                                            \
    scalar::Ggml<DType::kDType>::dot(rows, count, x_T, tokens, n, out_RT, next);                             \
  }                                                                                                          \
  void pi2::dot_a8_##dtype##__scalar(PI2_DOT_ARGS) {                                                         \
    scalar::Ggml<DType::kDType>::dot_a8(rows, count, x_T, tokens, n, out_RT, next);                          \
  }                                                                                                          \
  void pi2::prepare_##dtype##__scalar(PI2_PREPARE_ARGS) { scalar::Ggml<DType::kDType>::prepare(x, n, out); } \
  void pi2::prepare_a8_##dtype##__scalar(PI2_PREPARE_ARGS) { scalar::Ggml<DType::kDType>::prepare_a8(x, n, out); }

PI2_FORMAT(q4_1, kQ4_1)
PI2_FORMAT(q5_0, kQ5_0)
PI2_FORMAT(q5_1, kQ5_1)
PI2_FORMAT(q4_k, kQ4K)
PI2_FORMAT(q5_k, kQ5K)
PI2_FORMAT(q6_k, kQ6K)
PI2_FORMAT(tq2_0, kTQ2)

void pi2::axpy_tq2_0__scalar(PI2_AXPY_ARGS) { scalar::Ggml<DType::kTQ2>::axpy(y, rows, h, count, n, next); }
void pi2::restore_tq2_0__scalar(PI2_RESTORE_ARGS) { scalar::restore(y, n, out); }
