#include "kernels/avx512vnni/gemm.h"

void pi2::panel_q4__avx512vnni(PI2_PANEL_ARGS) { avx512vnni::panel_q4(rows, n, panel); }
