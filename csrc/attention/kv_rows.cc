// Keys and values as the rows of a cache.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/convert.h"
#include "base/parallel.h"
#include "base/scratch.h"
#include "kernels/scalar/convert.h"
#include "pi2/attention.h"
#include "pi2/linear.h"

namespace pi2 {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kTinyNumbers = 1 << 14;  // waking a thread costs a few microseconds

// 1 / scale; 0 for rows of zeros or of tiny numbers, and for those without a scale.
float inverse(float scale) {
  const float exact = 1 / scale;
  return std::isfinite(exact) ? exact : 0;
}

// The number of largest magnitude, the first of several; NaN if one is not finite.
float largest(const float* x, std::int64_t count) {
  float most = 0;
  bool finite = true;
  for (std::int64_t k = 0; k < count; ++k) {
    finite &= std::isfinite(x[k]);
    if (std::fabs(x[k]) > std::fabs(most)) most = x[k];
  }
  return finite ? most : kNaN;
}

void pack_i8(const float* x, std::int64_t width, char* row) {
  const float scale = std::fabs(largest(x, width)) / 127, by = inverse(scale);
  for (std::int64_t k = 0; k < width; ++k)
    row[k] = by == 0 ? 0 : static_cast<char>(static_cast<std::int8_t>(std::rint(x[k] * by)));
  std::memcpy(row + width, &scale, kKvScaleBytes);
}

// As weights are; NaN scales make all of a row NaN.
void pack_q4(const float* x, std::int64_t width, char* row) {
  const bool finite = std::fabs(largest(x, width)) <= largest_weight(DType::kQ4);  // false for NaN
  const std::vector<float> zeros(finite ? 0 : static_cast<std::size_t>(width));
  quantize(finite ? x : zeros.data(), DType::kF32, 1, width, DType::kQ4, row, serial());
  const std::uint16_t nan = narrow_f16(kNaN);
  for (std::int64_t g = 0; !finite && g < groups(width); ++g)
    std::memcpy(row + groups(width) * (kGroup / 2) + 2 * g, &nan, sizeof(nan));
}

}  // namespace

void rotate(float* x, std::int64_t width) {
  const std::int64_t size = width & -width;
  const auto factor = static_cast<float>(1 / std::sqrt(static_cast<double>(size)));
  for (float* end = x + width; x < end; x += size) {
    for (std::int64_t half = 1; half < size; half *= 2)
      for (std::int64_t at = 0; at < size; at += 2 * half)
        for (std::int64_t i = at; i < at + half; ++i) {
          const float a = x[i], b = x[i + half];
          x[i] = a + b;
          x[i + half] = a - b;
        }
    for (std::int64_t i = 0; i < size; ++i) x[i] *= factor;
  }
}

void pack_kv(const float* x, DType dtype, std::int64_t width, char* row) {
  if (dtype == DType::kI8) return pack_i8(x, width, row);
  if (dtype == DType::kQ4) return pack_q4(x, width, row);
  narrow(x, row, dtype, width);
}

bool write_kv(const WriteKvArgs& args, const ParallelFor& parallel) {
  const std::int64_t all = args.batch * args.tokens;
  if (std::any_of(args.at, args.at + all, [&](std::int64_t at) { return at < 0 || at >= args.length; })) return false;
  Dynamic::run(
      all * args.heads * args.width < kTinyNumbers ? serial() : parallel, all * args.heads,
      [](void* with, std::int64_t item) {
        const auto& a = *static_cast<const WriteKvArgs*>(with);
        const std::int64_t token = item / a.heads % a.tokens, head = item % a.heads, b = item / a.heads / a.tokens;
        const std::int64_t from = b * a.x_strides[0] + head * a.x_strides[1] + token * a.x_strides[2];
        float* x = scratch(Scratch::kInput, a.width);
        widen(static_cast<const char*>(a.x) + row_bytes(a.dtype, from), a.dtype, x, a.width);
        rotate(x, a.width);
        pack_kv(
            x, a.kv_dtype, a.width,
            a.rows + b * a.row_strides[0] + head * a.row_strides[1] + a.at[b * a.tokens + token] * a.row_strides[2]);
      },
      const_cast<WriteKvArgs*>(&args));
  return true;
}

}  // namespace pi2
