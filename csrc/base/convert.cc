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
    default: break;  // groups, not numbers
  }
  return 0;
}

namespace {

// One loop per type, so that the compiler vectorises it: other threads wait while rows are converted.
template <class T>
void widen_all(const void* from, float* to, std::int64_t count) {
  const auto* values = static_cast<const typename T::Storage*>(from);
  for (std::int64_t i = 0; i < count; ++i) to[i] = T::widen(values[i]);
}

}  // namespace

void widen(const void* from, DType dtype, float* to, std::int64_t count) {
  switch (dtype) {
    case DType::kF32: std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float)); return;
    case DType::kBF16: return widen_all<BF16>(from, to, count);
    case DType::kF16: return widen_all<F16>(from, to, count);
    case DType::kI8: return widen_all<I8>(from, to, count);
    default: break;  // groups, not numbers
  }
}

void narrow(const float* from, void* to, DType dtype, std::int64_t count) {
  auto* out = static_cast<std::uint16_t*>(to);
  if (dtype == DType::kF32)
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  else if (dtype == DType::kBF16)
    for (std::int64_t i = 0; i < count; ++i) out[i] = narrow_bf16(from[i]);
  else
    for (std::int64_t i = 0; i < count; ++i) out[i] = narrow_f16(from[i]);
}

}  // namespace pi2
