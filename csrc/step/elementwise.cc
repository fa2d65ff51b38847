#include "step/elementwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/convert.h"
#include "base/for_each_cpu.h"

namespace pi2 {
namespace {

constexpr std::int64_t kChunk = 512;  // numbers that are converted at a time

// y = a op b, where a step of 0 repeats one number.
PI2_FOR_EACH_CPU void add(float* y, const float* a, const float* b, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = a[i] + b[i];
}
PI2_FOR_EACH_CPU void sub(float* y, const float* a, const float* b, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = a[i] - b[i];
}
PI2_FOR_EACH_CPU void mul(float* y, const float* a, const float* b, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = a[i] * b[i];
}
PI2_FOR_EACH_CPU void div(float* y, const float* a, const float* b, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = a[i] / b[i];
}
PI2_FOR_EACH_CPU void add_one(float* y, const float* a, float b, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = a[i] + b;
}
PI2_FOR_EACH_CPU void mul_one(float* y, const float* a, float b, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = a[i] * b;
}
PI2_FOR_EACH_CPU void widen_bf16(float* y, const std::uint16_t* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t bits = std::uint32_t{x[i]} << 16;
    std::memcpy(&y[i], &bits, sizeof(bits));
  }
}
// As narrow_bf16, without a branch.
PI2_FOR_EACH_CPU void narrow_all_bf16(std::uint16_t* y, const float* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, &x[i], sizeof(bits));
    const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
    y[i] = static_cast<std::uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
  }
}
void inverse_roots(float* y, const float* a, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = 1.0f / std::sqrt(a[i]);
}
void negate(float* y, const float* a, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = -a[i];
}

void compute(StepOp op, float* y, const float* a, const float* b, std::int64_t n) {
  switch (op) {
    case StepOp::kAdd: return add(y, a, b, n);
    case StepOp::kSub: return sub(y, a, b, n);
    case StepOp::kMul: return mul(y, a, b, n);
    case StepOp::kDiv: return div(y, a, b, n);
    case StepOp::kNeg: return negate(y, a, n);
    case StepOp::kSquare: return mul(y, a, a, n);
    case StepOp::kRsqrt: return inverse_roots(y, a, n);
    default: std::memmove(y, a, static_cast<std::size_t>(n) * sizeof(float));
  }
}

float number_at(const char* data, Element element) {
  if (element != Element::kI64) return load_float(data, static_cast<DType>(element), 0);
  std::int64_t value;
  std::memcpy(&value, data, sizeof(value));
  return static_cast<float>(value);
}

// n numbers as floats, where they are or in `kept`.
const float* floats(const char* data, Element element, std::int64_t stride, std::int64_t n, float* kept) {
  if (element == Element::kF32 && stride == 1) return reinterpret_cast<const float*>(data);
  if (stride == 1 && element == Element::kBF16) {
    widen_bf16(kept, reinterpret_cast<const std::uint16_t*>(data), n);
  } else if (stride == 1 && element != Element::kI64) {
    widen(data, static_cast<DType>(element), kept, n);
  } else if (stride == 0) {
    std::fill_n(kept, n, number_at(data, element));
  } else {
    const std::int64_t step = stride * element_bytes(element);
    for (std::int64_t i = 0; i < n; ++i) kept[i] = number_at(data + i * step, element);
  }
  return kept;
}

void store(const float* from, char* data, Element element, std::int64_t stride, std::int64_t n) {
  const auto dtype = static_cast<DType>(element);
  if (stride == 1 && element == Element::kBF16) return narrow_all_bf16(reinterpret_cast<std::uint16_t*>(data), from, n);
  if (stride == 1) return narrow(from, data, dtype, n);
  const std::int64_t step = stride * element_bytes(element);
  for (std::int64_t i = 0; i < n; ++i) narrow(from + i, data + i * step, dtype, 1);
}

struct Row {
  char* y;
  const char *a, *b;
};

void float_row(StepOp op, const Strided& y, const Strided& a, const Strided* b, const Row& at, float constant,
               std::int64_t n, const std::int64_t (&strides)[3]) {
  float kept_a[kChunk], kept_b[kChunk], out[kChunk];
  const bool binary = op >= StepOp::kAdd && op <= StepOp::kDiv;
  const bool direct = y.element == Element::kF32 && strides[0] == 1;
  const bool one = binary && (b == nullptr || strides[2] == 0);
  const float single = b == nullptr ? constant : one ? number_at(at.b, b->element) : 0;
  for (std::int64_t i = 0; i < n; i += kChunk) {
    const std::int64_t some = std::min(kChunk, n - i);
    char* to = at.y + i * strides[0] * element_bytes(y.element);
    float* result = direct ? reinterpret_cast<float*>(to) : out;
    const float* x = floats(at.a + i * strides[1] * element_bytes(a.element), a.element, strides[1], some, kept_a);
    if (one && (op == StepOp::kAdd || op == StepOp::kSub)) {
      add_one(result, x, op == StepOp::kAdd ? single : -single, some);
    } else if (one && op == StepOp::kMul) {
      mul_one(result, x, single, some);
    } else if (one) {
      std::fill_n(kept_b, some, single);
      compute(op, result, x, kept_b, some);
    } else {
      const float* z =
          binary ? floats(at.b + i * strides[2] * element_bytes(b->element), b->element, strides[2], some, kept_b)
                 : nullptr;
      compute(op, result, x, z, some);
    }
    if (!direct) store(result, to, y.element, strides[0], some);
  }
}

std::int64_t whole(const char* data, Element element) {
  if (element == Element::kByte) return *reinterpret_cast<const std::uint8_t*>(data);
  std::int64_t value;
  std::memcpy(&value, data, sizeof(value));
  return value;
}

// Results that are bytes or int64 numbers. Sums wrap around.
void whole_row(StepOp op, const Strided& y, const Strided& a, const Strided* b, const Row& at, std::int64_t constant,
               std::int64_t n, const std::int64_t (&strides)[3]) {
  const auto wrap = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
  for (std::int64_t i = 0; i < n; ++i) {
    const char* from = at.a + i * strides[1] * element_bytes(a.element);
    const bool is_float = op == StepOp::kIsFinite;
    const std::int64_t x = is_float ? 0 : whole(from, a.element);
    const std::int64_t z =
        b == nullptr ? constant : whole(at.b + i * strides[2] * element_bytes(b->element), b->element);
    std::int64_t value = x;
    switch (op) {
      case StepOp::kAdd: value = static_cast<std::int64_t>(wrap(x) + wrap(z)); break;
      case StepOp::kSub: value = static_cast<std::int64_t>(wrap(x) - wrap(z)); break;
      case StepOp::kMul: value = static_cast<std::int64_t>(wrap(x) * wrap(z)); break;
      case StepOp::kLess: value = x < z; break;
      case StepOp::kLessEqual: value = x <= z; break;
      case StepOp::kAnd: value = x & z; break;
      case StepOp::kIsFinite: value = std::isfinite(number_at(from, a.element)); break;
      case StepOp::kWhere: value = z != 0 ? x : constant; break;
      default: break;
    }
    char* to = at.y + i * strides[0] * element_bytes(y.element);
    if (y.element == Element::kByte)
      *to = static_cast<char>(value);
    else
      std::memcpy(to, &value, sizeof(value));
  }
}

PI2_FOR_EACH_CPU float largest_of(const float* x, std::int64_t n, bool* nan) {
  constexpr std::int64_t kLanes = 64;
  float most[kLanes];
  int unordered[kLanes] = {};
  std::fill_n(most, kLanes, x[0]);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::int64_t k = 0; k < kLanes; ++k) {
      most[k] = x[i + k] > most[k] ? x[i + k] : most[k];
      unordered[k] |= x[i + k] != x[i + k];
    }
  for (; i < n; ++i) {
    most[0] = x[i] > most[0] ? x[i] : most[0];
    unordered[0] |= x[i] != x[i];
  }
  for (std::int64_t k = 0; k < kLanes; ++k) {
    most[0] = most[k] > most[0] ? most[k] : most[0];
    *nan = *nan || unordered[k] != 0;
  }
  return most[0];
}

}  // namespace

std::int64_t element_bytes(Element element) {
  return element == Element::kF32 ? 4 : element == Element::kI64 ? 8 : element == Element::kByte ? 1 : 2;
}

void elementwise(StepOp op, int rank, const Strided& y, const Strided& a, const Strided* b, double constant) {
  std::int64_t outer = 1;
  for (int d = 0; d + 1 < rank; ++d) outer *= y.sizes[d];
  const std::int64_t n = rank == 0 ? 1 : y.sizes[rank - 1];
  const int last = rank - 1;
  const std::int64_t strides[3] = {rank == 0 ? 1 : y.strides[last], rank == 0 ? 1 : a.strides[last],
                                   rank == 0 || b == nullptr ? 1 : b->strides[last]};
  std::int64_t index[StepProgram::kMostRank] = {};
  for (std::int64_t o = 0; o < outer; ++o) {
    Row at{y.data, a.data, b == nullptr ? nullptr : b->data};
    for (int d = 0; d < last; ++d) {
      at.y += index[d] * y.strides[d] * element_bytes(y.element);
      at.a += index[d] * a.strides[d] * element_bytes(a.element);
      if (b != nullptr) at.b += index[d] * b->strides[d] * element_bytes(b->element);
    }
    if (y.element >= Element::kI64)
      whole_row(op, y, a, b, at, std::fabs(constant) < 0x1p53 ? static_cast<std::int64_t>(constant) : 0, n, strides);
    else
      float_row(op, y, a, b, at, static_cast<float>(constant), n, strides);
    for (int d = last - 1; d >= 0 && ++index[d] == y.sizes[d]; --d) index[d] = 0;
  }
}

std::int64_t argmax_of(const float* x, std::int64_t n) {
  bool nan = false;
  const float most = largest_of(x, n, &nan);
  std::int64_t i = 0;
  while (nan ? x[i] == x[i] : x[i] != most) ++i;
  return i;
}

// PyTorch's order (the pairwise "cascade" sum of its reductions): 32 sums, lane by lane, over runs of at least 16 of
// each, four levels of them; then the four vectors of eight lanes, the numbers that fill no vector, and the lanes.
float mean_of(const float* x, std::int64_t n) {
  constexpr std::int64_t kLanes = 8, kVectors = 4, kWidth = kLanes * kVectors, kLevels = 4;
  if (n < kLanes) {  // four sums
    float sums[4] = {};
    for (std::int64_t k = 0; k < n; ++k) sums[k < n / 4 * 4 ? k % 4 : 0] += x[k];
    return (((sums[0] + sums[1]) + sums[2]) + sums[3]) / static_cast<float>(n);
  }
  const std::int64_t vectors = n / kLanes, rows = vectors / kVectors;
  std::int64_t log = 0;
  while ((std::int64_t{1} << log) < rows) ++log;
  const std::int64_t power = std::max<std::int64_t>(4, log / kLevels), step = std::int64_t{1} << power;
  float level[kLevels][kWidth] = {};
  const auto add_row = [&](std::int64_t row) {
    for (std::int64_t k = 0; k < kWidth; ++k) level[0][k] += x[row * kWidth + k];
  };
  std::int64_t i = 0;
  while (i + step <= rows) {
    for (std::int64_t j = 0; j < step; ++j, ++i) add_row(i);
    for (std::int64_t j = 1; j < kLevels; ++j) {
      for (std::int64_t k = 0; k < kWidth; ++k) level[j][k] += level[j - 1][k], level[j - 1][k] = 0;
      if ((i & ((step - 1) << (j * power))) != 0) break;
    }
  }
  for (; i < rows; ++i) add_row(i);
  for (std::int64_t j = 1; j < kLevels; ++j)
    for (std::int64_t k = 0; k < kWidth; ++k) level[0][k] += level[j][k];
  float lanes[kLanes];
  std::copy_n(level[0], kLanes, lanes);
  for (std::int64_t v = rows * kVectors; v < vectors; ++v)
    for (std::int64_t k = 0; k < kLanes; ++k) lanes[k] += x[v * kLanes + k];
  for (std::int64_t v = 1; v < kVectors; ++v)
    for (std::int64_t k = 0; k < kLanes; ++k) lanes[k] += level[0][v * kLanes + k];
  float sum = 0;
  for (std::int64_t k = vectors * kLanes; k < n; ++k) sum += x[k];
  for (const float lane : lanes) sum += lane;
  return sum / static_cast<float>(n);
}

}  // namespace pi2
