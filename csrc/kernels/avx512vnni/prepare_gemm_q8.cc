#include "kernels/avx512vnni/gemm.h"

void pi2::prepare_gemm_q8__avx512vnni(PI2_PREPARE_ARGS) { avx512vnni::prepare_gemm(x, n, out, 128); }
