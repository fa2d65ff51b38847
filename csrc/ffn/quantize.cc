// Float rows to quantised rows and back.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "base/convert.h"
#include "base/parallel.h"
#include "kernels/scalar/ggml.h"
#include "pi2/linear.h"

namespace pi2 {
namespace {

constexpr std::int64_t kBlockRows = 16;

struct Restoring {
  const char* rows;
  DType from, to;
  std::int64_t count, columns, stride_bytes;
  char* out;

  // Group by group: values(row, g, out) writes the kGroup numbers of group g.
  template <class Values>
  void rows_of(std::int64_t begin, std::int64_t end, const Values& values) const {
    for (std::int64_t i = begin; i < end; ++i) {
      char* to_row = out + i * row_bytes(to, columns);
      for (std::int64_t g = 0; g < groups(columns); ++g) {
        float group[kGroup];
        values(rows + i * stride_bytes, g, group);
        narrow(group, to_row + g * kGroup * row_bytes(to, 1), to, std::min(kGroup, columns - g * kGroup));
      }
    }
  }

  template <class Format>
  void quantized_rows(std::int64_t begin, std::int64_t end) const {
    rows_of(begin, end, [this](const char* row, std::int64_t g, float* values) {
      const float scale = scalar::scale_of<Format>(row, columns, g);
      for (std::int64_t k = 0; k < kGroup; ++k) values[k] = scale * static_cast<float>(Format::at(row, g, k));
    });
  }

  template <DType kDType>
  void ggml_rows(std::int64_t begin, std::int64_t end) const {
    rows_of(begin, end, [](const char* row, std::int64_t g, float* values) {
      const scalar::GgmlGroup group = scalar::ggml_group<kDType>(row, g);
      for (std::int64_t k = 0; k < kGroup; ++k) values[k] = group.weight(k);
    });
  }

  void block(std::int64_t index) const {
    const std::int64_t begin = index * kBlockRows, end = std::min(count, begin + kBlockRows);
    switch (from) {
      case DType::kQ4: return quantized_rows<scalar::Q4>(begin, end);
      case DType::kQ8: return quantized_rows<scalar::Q8>(begin, end);
      case DType::kQ4_1: return ggml_rows<DType::kQ4_1>(begin, end);
      case DType::kQ5_0: return ggml_rows<DType::kQ5_0>(begin, end);
      case DType::kQ5_1: return ggml_rows<DType::kQ5_1>(begin, end);
      case DType::kQ4K: return ggml_rows<DType::kQ4K>(begin, end);
      case DType::kQ5K: return ggml_rows<DType::kQ5K>(begin, end);
      case DType::kQ6K: return ggml_rows<DType::kQ6K>(begin, end);
      case DType::kTQ2: return ggml_rows<DType::kTQ2>(begin, end);
      default: return;  // numbers, not groups
    }
  }
};

// A quantisation of one group: integers in [low, high] with `scale`, and its error.
struct Candidate {
  float scale = 0;
  double error = std::numeric_limits<double>::infinity();
};

constexpr std::int64_t kSound = std::numeric_limits<std::int64_t>::max();

struct Quantizing {
  const char* w;
  DType from, to;
  std::int64_t count, columns;
  char* rows;
  // Position (row * columns + column) of the first weight that cannot be quantised. Workers report here and go on with
  // the next row: nothing may be thrown on a thread of the host.
  std::atomic<std::int64_t> broken{kSound};

  // The integer of a weight under a scale; 0 where the scale is 0.
  int integer(float value, float scale) const {
    const float low = to == DType::kQ4 ? -8.0f : -127.0f, high = to == DType::kQ4 ? 7.0f : 127.0f;
    if (scale == 0) return 0;
    return static_cast<int>(std::min(high, std::max(low, std::nearbyint(value / scale))));
  }

  // Replaces `best` if this scale has a smaller error: among equals the first stays.
  void consider(float scale, const float* x, std::int64_t n, Candidate* best) const {
    scale = F16::widen(narrow_f16(scale));
    double error = 0;
    for (std::int64_t k = 0; k < n; ++k) {
      const float off = x[k] - scale * static_cast<float>(integer(x[k], scale));
      error += static_cast<double>(off * off);
    }
    if (error < best->error) *best = {scale, error};
  }

  float scale_of(const float* x, std::int64_t n) const {
    float extreme = 0;  // the first value of largest magnitude, with its sign
    for (std::int64_t k = 0; k < n; ++k)
      if (std::fabs(x[k]) > std::fabs(extreme)) extreme = x[k];
    if (to == DType::kQ8) return F16::widen(narrow_f16(std::fabs(extreme) / 127.0f));
    Candidate best;
    // The extreme value at -8, as in Q4_0; then scales around that, and the extreme at +7.
    for (const float end : {-8.0f, -8.5f, -9.0f, -9.5f, -7.5f, 7.0f, 7.5f, 8.0f}) consider(extreme / end, x, n, &best);
    return best.scale;
  }

  void report(std::int64_t place) {
    std::int64_t first = broken.load(std::memory_order_relaxed);
    while (place < first && !broken.compare_exchange_weak(first, place, std::memory_order_relaxed)) {
    }
  }

  void row(std::int64_t i) {
    const char* in = w + i * row_bytes(from, columns);
    const float largest = largest_weight(to);
    char* out = rows + i * row_bytes(to, columns);
    auto* scales = reinterpret_cast<std::uint16_t*>(out + row_bytes(to, columns) - 2 * groups(columns));
    for (std::int64_t g = 0; g < groups(columns); ++g) {
      const std::int64_t n = std::min(kGroup, columns - g * kGroup);
      float x[kGroup];
      widen(in + g * kGroup * row_bytes(from, 1), from, x, n);
      for (std::int64_t k = 0; k < n; ++k)
        if (!(std::fabs(x[k]) <= largest)) return report(i * columns + g * kGroup + k);  // a NaN compares false
      const float scale = scale_of(x, n);
      scales[g] = narrow_f16(scale);
      int integers[kGroup] = {};
      for (std::int64_t k = 0; k < n; ++k) integers[k] = integer(x[k], scale);
      if (to == DType::kQ8) {
        for (std::int64_t k = 0; k < kGroup; ++k) out[g * kGroup + k] = static_cast<char>(integers[k]);
      } else {
        for (std::int64_t k = 0; k < kGroup / 2; ++k)
          out[g * kGroup / 2 + k] = static_cast<char>((integers[k] + 8) | (integers[k + kGroup / 2] + 8) << 4);
      }
    }
  }

  void block(std::int64_t index) {
    for (std::int64_t i = index * kBlockRows; i < std::min(count, (index + 1) * kBlockRows); ++i) row(i);
  }
};

}  // namespace

QuantizeFault quantize(const void* w, DType from, std::int64_t count, std::int64_t columns, DType to, void* rows,
                       const ParallelFor& parallel) {
  Quantizing work{static_cast<const char*>(w), from, to, count, columns, static_cast<char*>(rows)};
  Dynamic::run(
      parallel, (count + kBlockRows - 1) / kBlockRows,
      [](void* q, std::int64_t index) { static_cast<Quantizing*>(q)->block(index); }, &work);
  const std::int64_t place = work.broken.load();
  if (place == kSound) return {};
  return {true, place / columns, place % columns, load_float(w, from, place)};
}

void dequantize(const void* rows, DType from, std::int64_t count, std::int64_t columns, std::int64_t stride_bytes,
                void* out, DType to, const ParallelFor& parallel) {
  Restoring work{static_cast<const char*>(rows), from, to, count, columns, stride_bytes, static_cast<char*>(out)};
  Dynamic::run(
      parallel, (count + kBlockRows - 1) / kBlockRows,
      [](void* w, std::int64_t index) { static_cast<const Restoring*>(w)->block(index); }, &work);
}

}  // namespace pi2
