#include <cstring>

#include "pi2/kernels.h"

std::uint64_t pi2::read__scalar(PI2_READ_ARGS) {
  const char* p = static_cast<const char*>(data);
  std::uint64_t sum = 0;
  std::int64_t k = 0;
  for (; k + 8 <= bytes; k += 8) {
    std::uint64_t word;
    std::memcpy(&word, p + k, 8);
    sum += word;
  }
  for (; k < bytes; ++k) sum += static_cast<unsigned char>(p[k]);
  return sum;
}
