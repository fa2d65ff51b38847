#include "kernels/avx512vnni/ggml.h"

#include "kernels/avx512vnni/ggml_blocks.h"

#define PI2_FORMAT(dtype, Format)                                                                  \
  void pi2::dot_a8_##dtype##__avx512vnni(PI2_DOT_ARGS) {                                           \
    GgmlRows<avx512vnni::Ggml<avx512::Format>>::dot_a8(rows, count, x_T, tokens, n, out_RT, next); \
  }                                                                                                \
  void pi2::prepare_gemm_##dtype##__avx512vnni(PI2_PREPARE_ARGS) {                                 \
    avx512vnni::GgmlPanels<avx512::Format>::prepare(x, n, out);                                    \
  }                                                                                                \
  void pi2::panel_##dtype##__avx512vnni(PI2_PANEL_ARGS) {                                          \
    avx512vnni::GgmlPanels<avx512::Format>::panel(rows, n, panel);                                 \
  }                                                                                                \
  void pi2::gemm_##dtype##__avx512vnni(PI2_GEMM_ARGS) {                                            \
    avx512vnni::GgmlPanels<avx512::Format>::gemm(panels, panel_count, x_T, tokens, n, out, ldo);   \
  }

PI2_FORMAT(q4_1, GgmlSmall<DType::kQ4_1>)
PI2_FORMAT(q5_0, GgmlSmall<DType::kQ5_0>)
PI2_FORMAT(q5_1, GgmlSmall<DType::kQ5_1>)
PI2_FORMAT(q4_k, GgmlK<DType::kQ4K>)
PI2_FORMAT(q5_k, GgmlK<DType::kQ5K>)
PI2_FORMAT(q6_k, GgmlQ6K)
PI2_FORMAT(tq2_0, GgmlTQ2)

#define PI2_BLOCKS(dtype, Format)                                                             \
  void pi2::dot_blocks_##dtype##__avx512vnni(PI2_DOT_BLOCKS_ARGS) {                           \
    avx512vnni::GgmlBlocks<avx512vnni::Format>::dot(blocks, count, x_T, tokens, n, out, ldo); \
  }

PI2_BLOCKS(q4_1, SmallBlock<DType::kQ4_1>)
PI2_BLOCKS(q5_0, SmallBlock<DType::kQ5_0>)
PI2_BLOCKS(q5_1, SmallBlock<DType::kQ5_1>)
PI2_BLOCKS(q4_k, KBlock<DType::kQ4K>)
PI2_BLOCKS(q5_k, KBlock<DType::kQ5K>)
PI2_BLOCKS(q6_k, BlockQ6K)
PI2_BLOCKS(tq2_0, BlockTQ2)
