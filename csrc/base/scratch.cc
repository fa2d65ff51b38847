#include "base/scratch.h"

#include <cstdlib>
#include <new>

namespace pi2 {
namespace {

struct Buffer {
  float* data = nullptr;
  std::int64_t capacity = 0;

  ~Buffer() { std::free(data); }

  float* at_least(std::int64_t count) {
    if (count > capacity) {
      std::free(data);
      data = nullptr;
      capacity = 0;
      const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(float) + 63) / 64 * 64;
      data = static_cast<float*>(std::aligned_alloc(64, bytes));
      if (data == nullptr) throw std::bad_alloc();
      capacity = count;
    }
    return data;
  }
};

}  // namespace

float* scratch(Scratch slot, std::int64_t count) {
  thread_local Buffer buffers[static_cast<int>(Scratch::kCount)];
  return buffers[static_cast<int>(slot)].at_least(count);
}

}  // namespace pi2
