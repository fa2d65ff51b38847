#include "kernels/addmm.h"

#include "kernels/avx512/impl.h"

void pi2::addmm__avx512(PI2_ADDMM_ARGS) { addmm<avx512::Simd, 6, 4>(h_T, w, ldw, count, first, width, y_T, tokens); }
