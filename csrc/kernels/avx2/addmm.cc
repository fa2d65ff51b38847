#include "kernels/addmm.h"

#include "kernels/avx2/impl.h"

void pi2::addmm__avx2(PI2_ADDMM_ARGS) { addmm<avx2::Simd, 4, 2>(h_T, w, ldw, count, first, width, y_T, tokens); }
