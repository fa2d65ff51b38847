#include "kernels/avx512vnni/gemm.h"

void pi2::gemm__avx512vnni(PI2_GEMM_ARGS) { avx512vnni::gemm(panels, panel_count, x_T, tokens, n, out, ldo); }
