#include "kernels/addmm.h"

#include "kernels/neon/impl.h"

void pi2::addmm__neon(PI2_ADDMM_ARGS) { addmm<neon::Simd, 4, 4>(h_T, w, ldw, count, first, width, y_T, tokens); }
