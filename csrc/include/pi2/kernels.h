// The kernel table: one set of function pointers per instruction set, chosen once at run time.
//
// A kernel is one file and one line in kernels/list.inc, which this header, the table, the tests and the
// benchmarks all include: a new kernel cannot escape testing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pi2/types.h"

namespace pi2 {

// out_RT[r * tokens + t] = sum_k rows[r][k] * x_T[t][k], for r in [0, count <= kDotRows), t in [0, tokens).
// The order of each sum depends on n alone, never on count or tokens: a token gives the same bits alone and in a batch.
// [next, next + next_bytes) is what will be read after these rows (a prefetch hint); next_bytes 0 for none.
#define PI2_DOT_ARGS                                                                                         \
  const void *const *rows, std::int64_t count, const float *const *x_T, std::int64_t tokens, std::int64_t n, \
      float *out_RT, const void *next, std::int64_t next_bytes
// y[k] += h[0] * rows[0][k], then h[1] * rows[1][k], ... for count rows (1..kAxpyRows), in that order.
#define PI2_AXPY_ARGS float *y, const void *const *rows, const float *h, std::int64_t count, std::int64_t n
// Reads `bytes` and returns a checksum: what memory can deliver when nothing is computed.
#define PI2_READ_ARGS const void *data, std::int64_t bytes

constexpr std::int64_t kDotRows = 2;
constexpr std::int64_t kAxpyRows = 4;

using DotFn = void (*)(PI2_DOT_ARGS);
using AxpyFn = void (*)(PI2_AXPY_ARGS);
using ReadFn = std::uint64_t (*)(PI2_READ_ARGS);

#define PI2_DOT(isa, dtype) void dot_##dtype##__##isa(PI2_DOT_ARGS);
#define PI2_AXPY(isa, dtype) void axpy_##dtype##__##isa(PI2_AXPY_ARGS);
#define PI2_READ(isa) std::uint64_t read__##isa(PI2_READ_ARGS);
#include "kernels/list.inc"
#undef PI2_DOT
#undef PI2_AXPY
#undef PI2_READ

struct KernelTable {
  const char* isa;       // "scalar", "avx2", "avx512"
  DotFn dot[kDTypes];    // by DType
  AxpyFn axpy[kDTypes];  // by DType; null for int8
  ReadFn read;
};

// The best table this CPU can run, or the one named by PI2_CPU_CAPABILITY (for tests).
const KernelTable& kernels();

// Every table this CPU can run, best last; `count` receives their number.
const KernelTable* const* available_kernels(int* count);

// Selects a table by name for the whole process. Returns false if this CPU lacks it or no such name exists.
bool select_kernels(const char* isa);

}  // namespace pi2
