// Converts arrays of stored numbers to float and back.
#pragma once

#include <cstdint>

#include "pi2/types.h"

namespace pi2 {

float load_float(const void* data, DType dtype, std::int64_t index);
void widen(const void* from, DType dtype, float* to, std::int64_t count);
void narrow(const float* from, void* to, DType dtype, std::int64_t count);

}  // namespace pi2
