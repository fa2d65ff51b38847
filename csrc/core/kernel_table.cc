// Builds the kernel tables from kernels/list.inc and picks one.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "pi2/kernels.h"

namespace pi2 {
namespace {

// kernels/list.inc is grouped by instruction set; each include below keeps one group by its name.
constexpr int index_of(const char* dtype) {
  return dtype[0] == 'b'   ? static_cast<int>(DType::kBF16)
         : dtype[0] == 'i' ? static_cast<int>(DType::kI8)
         : dtype[1] == '3' ? static_cast<int>(DType::kF32)
                           : static_cast<int>(DType::kF16);
}

KernelTable build(const char* isa) {
  KernelTable table{isa, {}, {}, nullptr};
#define PI2_DOT(name, dtype) \
  if (std::strcmp(isa, #name) == 0) table.dot[index_of(#dtype)] = dot_##dtype##__##name;
#define PI2_AXPY(name, dtype) \
  if (std::strcmp(isa, #name) == 0) table.axpy[index_of(#dtype)] = axpy_##dtype##__##name;
#define PI2_READ(name) \
  if (std::strcmp(isa, #name) == 0) table.read = read__##name;
#include "kernels/list.inc"
#undef PI2_DOT
#undef PI2_AXPY
#undef PI2_READ
  return table;
}

struct Available {
  KernelTable tables[3];
  const KernelTable* pointers[3];
  int count = 0;

  void add(const char* isa) {
    tables[count] = build(isa);
    pointers[count] = &tables[count];
    ++count;
  }

  Available() {
    add("scalar");
#if defined(PI2_HAVE_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) add("avx2");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
      add("avx512");
#endif
  }

  const KernelTable* find(const char* isa) const {
    for (int i = 0; i < count; ++i)
      if (std::strcmp(tables[i].isa, isa) == 0) return &tables[i];
    return nullptr;
  }
};

const Available& available() {
  static const Available instance;
  return instance;
}

std::atomic<const KernelTable*>& selected() {
  static std::atomic<const KernelTable*> table = [] {
    const Available& all = available();
    const char* wanted = std::getenv("PI2_CPU_CAPABILITY");
    const KernelTable* found = wanted != nullptr ? all.find(wanted) : nullptr;
    return found != nullptr ? found : all.pointers[all.count - 1];
  }();
  return table;
}

}  // namespace

const KernelTable& kernels() { return *selected().load(std::memory_order_relaxed); }

const KernelTable* const* available_kernels(int* count) {
  *count = available().count;
  return available().pointers;
}

bool select_kernels(const char* isa) {
  const KernelTable* found = available().find(isa);
  if (found == nullptr) return false;
  selected().store(found, std::memory_order_relaxed);
  return true;
}

ParallelFor serial() {
  ParallelFor parallel;
  parallel.run = [](void*, std::int64_t n, ParallelFor::Body body, void* context) {
    for (std::int64_t i = 0; i < n; ++i) body(context, i);
  };
  return parallel;
}

}  // namespace pi2
