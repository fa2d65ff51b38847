// Reads neurons from memory and computes nothing: the roofline in benchmarks.
#include <algorithm>
#include <atomic>

#include "base/parallel.h"
#include "pi2/ffn.h"
#include "pi2/kernels.h"

namespace pi2 {

std::uint64_t plain_read(const void* neuron_rows, std::int64_t neuron_bytes, std::int64_t count,
                         const std::int64_t* index, const ParallelFor& parallel) {
  struct Step {
    const char* base;
    std::int64_t bytes, count;
    const std::int64_t* index;
    ReadFn read;
    std::atomic<std::uint64_t> sum{0};
  };
  Step step{static_cast<const char*>(neuron_rows), neuron_bytes, count, index, kernels().read, {}};
  constexpr std::int64_t kNeurons = 16;
  auto some = [](void* context, std::int64_t block) {
    Step& s = *static_cast<Step*>(context);
    std::uint64_t sum = 0;
    const std::int64_t begin = block * kNeurons, end = std::min(s.count, begin + kNeurons);
    if (s.index == nullptr) {
      sum = s.read(s.base + begin * s.bytes, (end - begin) * s.bytes);
    } else {
      for (std::int64_t i = begin; i < end; ++i) sum += s.read(s.base + s.index[i] * s.bytes, s.bytes);
    }
    s.sum.fetch_add(sum, std::memory_order_relaxed);
  };
  Dynamic::run(parallel, (count + kNeurons - 1) / kNeurons, some, &step);
  return step.sum.load();
}

}  // namespace pi2
