// The kernel table: one set of function pointers per instruction set, chosen once at run time.
//
// A kernel is one function in kernels/<isa>/<dtype>.cc and one line in kernels/list.inc, which this header, the table,
// the tests and the benchmarks all include: a new kernel is always tested.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pi2/types.h"

namespace pi2 {

// Kernels of quantised rows take "prepared" inputs: in an order (and, for int8 activations, a precision) private to the
// instruction set, so that weights need no shuffling. Every prepared vector, and every y of an axpy over quantised
// rows, has room for padded(n) floats. Plain dtypes (f32, bf16, f16, i8) use plain float vectors of n numbers.
constexpr std::int64_t padded(std::int64_t n) { return (n + 127) / 128 * 128; }

// out_RT[r * tokens + t] = sum_k rows[r][k] * x_T[t][k], for r in [0, count <= kDotRows), t in [0, tokens).
// x_T[t]: float[n] for plain dtypes; the output of prepare (dot) or prepare_a8 (dot_a8) for quantised ones.
// The order of each sum depends on n alone, not on count or tokens: a token has the same bits alone and in a batch.
// next: null, or `count` rows that a later call will read: prefetched at the pace at which these are read, since bursts
// would stall.
#define PI2_DOT_ARGS                                                                                        \
  const void *const *rows, std::int64_t count, const void *const *x_T, std::int64_t tokens, std::int64_t n, \
      float *out_RT, const void *const *next
// y[k] += h[0] * rows[0][k], then h[1] * rows[1][k], ... for count rows (1..kAxpyRows), in that order.
// y: float[n] for plain dtypes; for quantised ones padded(n) floats, zero at first, in the order that restore undoes.
// next: null, or `count` rows that a later call will add: prefetched at the pace at which these are read.
#define PI2_AXPY_ARGS \
  float *y, const void *const *rows, const float *h, std::int64_t count, std::int64_t n, const void *const *next
// out (padded(n) floats of room, 64-byte aligned) = x[0, n) in the form that dot of this dtype takes.
#define PI2_PREPARE_ARGS const float *x, std::int64_t n, void *out
// out[0, n) = y as accumulated by axpy of this dtype, in plain order.
#define PI2_RESTORE_ARGS const float *y, std::int64_t n, float *out
// For prompts with int8 activations (null where the instruction set has none: dot is used): kPanelRows rows times many
// tokens. Writes panel_bytes(n) to `panel`: the rows unpacked, row by row within every group of four columns.
#define PI2_PANEL_ARGS const void *const *rows, std::int64_t n, void *panel
// out[t * ldo + r] = sum_k row r of panel p [k] * x_T[t][k], p = r / kPanelRows < panels <= kGemmPanels; x_T[t] is
// the output of prepare_gemm. The order of each sum depends on n alone.
#define PI2_GEMM_ARGS                                                                                               \
  const void *const *panels, std::int64_t panel_count, const void *const *x_T, std::int64_t tokens, std::int64_t n, \
      float *out, std::int64_t ldo
// Rows in blocks, for linear layers that stay in memory: kPanelRows rows interleaved (the same number of bytes), so
// that lanes are rows and a block is read as one stream. For every two groups of columns: 16 (q8) or 8 (q4) vectors of
// 64 bytes, then their 32 scales. Vector 4 i + d of q4 has bytes 4 d..4 d + 3 of group i of every row, as the row
// stores them; vector 8 i + s of q8 the values 4 s..4 s + 3 of group i, plus 128. n is a multiple of two groups. ggml's
// formats: one of its blocks of every row, four bytes of each at a time, then the remaining two, which are the scales
// of q6_k, tq2_0 and q5_0 (whose blocks begin with them, and in this order end with them).
//
// out[t * ldo + r] for the rows r of `count` (1 to kGemmPanels) consecutive blocks; x_T is the output of prepare_gemm.
// The same bits for any number of tokens, and those of gemm where there is one.
#define PI2_DOT_BLOCKS_ARGS                                                                                        \
  const void *blocks, std::int64_t count, const void *const *x_T, std::int64_t tokens, std::int64_t n, float *out, \
      std::int64_t ldo
// What dot_blocks gives for one block of 16 rows that lie in their own order, for few tokens; `next`: null, or 16 rows
// that are prefetched. Null where an instruction set has none: to_block (linear.h) makes a block.
#define PI2_DOT_LANES_ARGS                                                                                       \
  const void *const *rows, const void *const *next, const void *const *x_T, std::int64_t tokens, std::int64_t n, \
      float *out, std::int64_t ldo
// y_T[t][c] += h_T[t][0] * w[c], then h_T[t][1] * w[ldw + c], ... for `count` rows of w, in that order, for c in
// [first, first + width), t in [0, tokens): many tokens that use the same rows. A token's bits do not depend on others.
#define PI2_ADDMM_ARGS                                                                               \
  const float *const *h_T, const float *w, std::int64_t ldw, std::int64_t count, std::int64_t first, \
      std::int64_t width, float *const *y_T, std::int64_t tokens
// Reads `bytes` and returns a checksum: the roofline of memory.
#define PI2_READ_ARGS const void *data, std::int64_t bytes
// out[r] = number of bits in which row r differs from x, for `count` contiguous rows of `words` 64-bit words.
#define PI2_SIGNS_ARGS const void *rows, std::int64_t count, const void *x, std::int64_t words, std::int32_t *out

// Attention of queries to the keys and values of one key head, over the words a.begin to a.end of kAttendWord positions
// each: a partial softmax times the values. Within a row positions are taken in order: scores of a word, its maximum,
// the weights relative to the largest score so far, the values one by one. A row's bits depend on no other row and on
// no position that its token does not see. Positions of a word before the first or after the last that any token sees
// are not read.
constexpr std::int64_t kAttendWord = 64;
constexpr std::int64_t kAttendPad = 16;
struct AttendArgs {
  const float* q = nullptr;  // [tokens * group, ld], token by token; zero beyond width
  std::int64_t tokens = 0, group = 0, width = 0;
  std::int64_t ld = 0;        // of q and y: width, padded to kAttendPad
  const char* key = nullptr;  // of position 0
  const char* value = nullptr;
  std::int64_t key_stride = 0, value_stride = 0;  // bytes from one position to the next
  const std::uint64_t* mask = nullptr;  // [tokens, words]: bit i of word w set: the token sees position 64 w + i
  std::int64_t words = 0, begin = 0, end = 0;
  float scale = 1, softcap = 0;
  float* scores = nullptr;    // room for [tokens * group, kAttendWord]
  float* unpacked = nullptr;  // of q4: room for [kAttendWord, groups(width) * kGroup]
  // By row: the largest score so far (initially -inf), the sum of the weights relative to it (0), and y [., ld] (0).
  float* max = nullptr;
  float* sum = nullptr;
  float* y = nullptr;
};
#define PI2_ATTEND_ARGS const AttendArgs& a

constexpr std::int64_t kDotRows = 4;  // rows per call, at most
constexpr std::int64_t kAxpyRows = 4;
constexpr std::int64_t kPanelRows = 16;
constexpr std::int64_t kGemmPanels = 2;
// Unpacked bytes (padded to multiples of 128 columns), then one or two floats per row and group: the scale; ggml's
// blocks also have a minimum, or a scale for each half.
constexpr std::int64_t panel_bytes(std::int64_t n) {
  return kPanelRows * padded(n) + kPanelRows * 8 * (padded(n) / kGroup);
}

// Bytes that prepare_gemm writes: values, and at most twelve bytes per group.
constexpr std::int64_t gemm_input_bytes(std::int64_t n) {
  return (padded(n) + 12 * (padded(n) / kGroup) + 63) / 64 * 64;
}
constexpr bool in_blocks(std::int64_t rows, std::int64_t n) { return rows % kPanelRows == 0 && n % (2 * kGroup) == 0; }

using DotFn = void (*)(PI2_DOT_ARGS);
using AxpyFn = void (*)(PI2_AXPY_ARGS);
using PrepareFn = void (*)(PI2_PREPARE_ARGS);
using RestoreFn = void (*)(PI2_RESTORE_ARGS);
using PanelFn = void (*)(PI2_PANEL_ARGS);
using GemmFn = void (*)(PI2_GEMM_ARGS);
using DotBlocksFn = void (*)(PI2_DOT_BLOCKS_ARGS);
using DotLanesFn = void (*)(PI2_DOT_LANES_ARGS);
using AddmmFn = void (*)(PI2_ADDMM_ARGS);
using ReadFn = std::uint64_t (*)(PI2_READ_ARGS);
using SignsFn = void (*)(PI2_SIGNS_ARGS);
using AttendFn = void (*)(PI2_ATTEND_ARGS);

#define PI2_DOT(isa, dtype) void dot_##dtype##__##isa(PI2_DOT_ARGS);
#define PI2_DOT_A8(isa, dtype) void dot_a8_##dtype##__##isa(PI2_DOT_ARGS);
#define PI2_AXPY(isa, dtype) void axpy_##dtype##__##isa(PI2_AXPY_ARGS);
#define PI2_PREPARE(isa, dtype) void prepare_##dtype##__##isa(PI2_PREPARE_ARGS);
#define PI2_PREPARE_A8(isa, dtype) void prepare_a8_##dtype##__##isa(PI2_PREPARE_ARGS);
#define PI2_RESTORE(isa, dtype) void restore_##dtype##__##isa(PI2_RESTORE_ARGS);
#define PI2_PREPARE_GEMM(isa, dtype) void prepare_gemm_##dtype##__##isa(PI2_PREPARE_ARGS);
#define PI2_PANEL(isa, dtype) void panel_##dtype##__##isa(PI2_PANEL_ARGS);
#define PI2_DOT_BLOCKS(isa, dtype) void dot_blocks_##dtype##__##isa(PI2_DOT_BLOCKS_ARGS);
#define PI2_DOT_LANES(isa, dtype) void dot_lanes_##dtype##__##isa(PI2_DOT_LANES_ARGS);
#define PI2_GEMM(isa, dtype) void gemm_##dtype##__##isa(PI2_GEMM_ARGS);
#define PI2_ADDMM(isa) void addmm__##isa(PI2_ADDMM_ARGS);
#define PI2_READ(isa) std::uint64_t read__##isa(PI2_READ_ARGS);
#define PI2_SIGNS(isa) void count_signs__##isa(PI2_SIGNS_ARGS);
#define PI2_ATTEND(isa, dtype) void attend_##dtype##__##isa(PI2_ATTEND_ARGS);
#include "kernels/list.inc"
#include "kernels/list_end.inc"

// Names of dtypes in kernels/list.inc, in their order.
inline constexpr const char* kDTypeNames[kDTypes] = {"f32",  "bf16", "f16",  "i8",   "q4",   "q8",   "q4_1",
                                                     "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "tq2_0"};

// Entries are null where a dtype has no such kernel:
//   dot        all dtypes                  axpy       all but i8, and of ggml's blocks tq2_0
//   prepare    q4, q8 and ggml's blocks (float activations)             restore    q4, q8, tq2_0
//   attend     f32, bf16, f16, i8 (a float behind each row is its scale), q4
//   dot_a8, prepare_a8                     those of prepare (activations as int8 with a float scale per group of 32)
struct KernelTable {
  const char* isa;  // as in kernels/list.inc
  DotFn dot[kDTypes];
  DotFn dot_a8[kDTypes];
  AxpyFn axpy[kDTypes];
  PrepareFn prepare[kDTypes];
  PrepareFn prepare_a8[kDTypes];
  RestoreFn restore[kDTypes];
  PrepareFn prepare_gemm[kDTypes];  // with dot_blocks and gemm (with panel)
  PanelFn panel[kDTypes];
  DotBlocksFn dot_blocks[kDTypes];
  DotLanesFn dot_lanes[kDTypes];  // with dot_blocks
  GemmFn gemm[kDTypes];
  AddmmFn addmm;
  ReadFn read;
  SignsFn count_signs;
  AttendFn attend[kDTypes];
};

// The best table this CPU can run, or the one named by PI2_CPU_CAPABILITY (for tests).
const KernelTable& kernels();

// Every table this CPU can run, best last; `count` receives their number.
const KernelTable* const* available_kernels(int* count);

// Selects a table by name for the whole process. Returns false if this CPU lacks it or no such name exists.
bool select_kernels(const char* isa);

}  // namespace pi2
