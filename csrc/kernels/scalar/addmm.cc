#include "pi2/kernels.h"

void pi2::addmm__scalar(PI2_ADDMM_ARGS) {
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t i = 0; i < count; ++i)
      for (std::int64_t c = first; c < first + width; ++c) y_T[t][c] += h_T[t][i] * w[i * ldw + c];
}
