#include "kernels/avx512vnni/gemm.h"

void pi2::panel_q8__avx512vnni(PI2_PANEL_ARGS) { avx512vnni::panel_q8(rows, n, panel); }
