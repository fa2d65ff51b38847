// Builds the kernel tables from kernels/list.inc and picks one.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "pi2/kernels.h"

#if defined(PI2_HAVE_NEON) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#ifndef HWCAP2_I8MM  // headers older than Linux 5.10
#define HWCAP2_I8MM (1 << 13)
#endif
#endif

namespace pi2 {
namespace {

int index_of(const char* dtype) {
  int i = 0;
  while (std::strcmp(kDTypeNames[i], dtype) != 0) ++i;
  return i;
}

// `table`, with the kernels that kernels/list.inc has for `isa` replacing others.
KernelTable extended(KernelTable table, const char* isa) {
  table.isa = isa;
#define PI2_ENTRY(name, member, value) \
  if (std::strcmp(isa, #name) == 0) table.member = value;
#define PI2_DOT(name, dtype) PI2_ENTRY(name, dot[index_of(#dtype)], dot_##dtype##__##name)
#define PI2_DOT_A8(name, dtype) PI2_ENTRY(name, dot_a8[index_of(#dtype)], dot_a8_##dtype##__##name)
#define PI2_AXPY(name, dtype) PI2_ENTRY(name, axpy[index_of(#dtype)], axpy_##dtype##__##name)
#define PI2_PREPARE(name, dtype) PI2_ENTRY(name, prepare[index_of(#dtype)], prepare_##dtype##__##name)
#define PI2_PREPARE_A8(name, dtype) PI2_ENTRY(name, prepare_a8[index_of(#dtype)], prepare_a8_##dtype##__##name)
#define PI2_RESTORE(name, dtype) PI2_ENTRY(name, restore[index_of(#dtype)], restore_##dtype##__##name)
#define PI2_PREPARE_GEMM(name, dtype) PI2_ENTRY(name, prepare_gemm[index_of(#dtype)], prepare_gemm_##dtype##__##name)
#define PI2_PANEL(name, dtype) PI2_ENTRY(name, panel[index_of(#dtype)], panel_##dtype##__##name)
#define PI2_DOT_BLOCKS(name, dtype) PI2_ENTRY(name, dot_blocks[index_of(#dtype)], dot_blocks_##dtype##__##name)
#define PI2_DOT_LANES(name, dtype) PI2_ENTRY(name, dot_lanes[index_of(#dtype)], dot_lanes_##dtype##__##name)
#define PI2_GEMM(name, dtype) PI2_ENTRY(name, gemm[index_of(#dtype)], gemm_##dtype##__##name)
#define PI2_ADDMM(name) PI2_ENTRY(name, addmm, addmm__##name)
#define PI2_READ(name) PI2_ENTRY(name, read, read__##name)
#define PI2_SIGNS(name) PI2_ENTRY(name, count_signs, count_signs__##name)
#define PI2_ATTEND(name, dtype) PI2_ENTRY(name, attend[index_of(#dtype)], attend_##dtype##__##name)
#include "kernels/list.inc"
#include "kernels/list_end.inc"
#undef PI2_ENTRY
  return table;
}

struct Available {
  static constexpr int kMost = 8;
  KernelTable tables[kMost];
  const KernelTable* pointers[kMost];
  int count = 0;

  // Adds `isa`, which inherits the kernels of `parent`.
  void add(const char* isa, const char* parent = nullptr) {
    tables[count] = extended(parent == nullptr ? KernelTable{} : *find(parent), isa);
    pointers[count] = &tables[count];
    ++count;
  }

  Available() {
    add("scalar");
#if defined(PI2_HAVE_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
      add("avx2", "scalar");
    if (find("avx2") != nullptr && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
      add("avx512", "avx2");
    if (find("avx512") != nullptr && __builtin_cpu_supports("avx512vnni")) add("avx512vnni", "avx512");
#endif
#if defined(PI2_HAVE_NEON)
    add("neon", "scalar");  // part of every 64-bit ARM CPU
#if defined(__linux__)
    if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0) add("neon_dotprod", "neon");
    if (find("neon_dotprod") != nullptr && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0) add("neon_i8mm", "neon_dotprod");
#endif
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

}  // namespace pi2
