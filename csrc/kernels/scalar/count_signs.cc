#include <cstring>

#include "pi2/kernels.h"

void pi2::count_signs__scalar(PI2_SIGNS_ARGS) {
  const char* row = static_cast<const char*>(rows);
  for (std::int64_t r = 0; r < count; ++r, row += 8 * words) {
    std::int32_t sum = 0;
    for (std::int64_t k = 0; k < words; ++k) {
      std::uint64_t w, v;
      std::memcpy(&w, row + 8 * k, sizeof(w));
      std::memcpy(&v, static_cast<const char*>(x) + 8 * k, sizeof(v));
      sum += __builtin_popcountll(w ^ v);
    }
    out[r] = sum;
  }
}
