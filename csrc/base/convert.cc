#include "base/convert.h"

#include <cstring>

#include "kernels/scalar/convert.h"

namespace pi2 {

float load_float(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kF32: return static_cast<const float*>(data)[index];
    case DType::kBF16: return BF16::widen(static_cast<const std::uint16_t*>(data)[index]);
    case DType::kF16: return F16::widen(static_cast<const std::uint16_t*>(data)[index]);
    case DType::kI8: return I8::widen(static_cast<const std::int8_t*>(data)[index]);
    case DType::kQ4:
    case DType::kQ8: break;  // groups, not numbers
  }
  return 0;
}

void widen(const void* from, DType dtype, float* to, std::int64_t count) {
  if (dtype == DType::kF32) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) to[i] = load_float(from, dtype, i);
}

void narrow(const float* from, void* to, DType dtype, std::int64_t count) {
  if (dtype == DType::kF32) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
    return;
  }
  auto* out = static_cast<std::uint16_t*>(to);
  for (std::int64_t i = 0; i < count; ++i) out[i] = dtype == DType::kBF16 ? narrow_bf16(from[i]) : narrow_f16(from[i]);
}

}  // namespace pi2
