// Matrix times few vectors: bound by reading the matrix once.
#include "pi2/linear.h"

#include <algorithm>
#include <vector>

#include "base/convert.h"
#include "base/parallel.h"
#include "base/scratch.h"
#include "base/timings.h"
#include "base/trace.h"
#include "ffn/panels.h"
#include "ffn/rows_ahead.h"
#include "pi2/kernels.h"

namespace pi2 {
namespace {

constexpr std::int64_t kTokenTile = 64;
constexpr std::int64_t kAheadBytes = 12288;  // prefetch distance: memory latency is about 200 ns
constexpr std::int64_t kTinyWeights = 1 << 18;
constexpr std::int64_t kBlocksTokens = 256;
constexpr std::int64_t kTwoBlocksFrom = 2;
constexpr std::int64_t kItems = 4, kItemBytes = 160 << 10;  // of a thread, at most; of an item of few tokens, at least
constexpr std::int64_t kPromptItems = 32;                   // of a thread
// Bytes of prepared inputs that are used together, and of the rows of such passes. With more inputs, several passes
// over rows in the second-level cache are faster than reading the inputs from there for each pair of rows.
constexpr std::int64_t kInputBytes = 32768, kPassBytes = 131072;

struct Pass {
  const LinearArgs& args;
  DotFn dot;
  std::int64_t tokens, row_bytes;
  std::int64_t block_rows;  // per work item: long enough to stream, short enough to balance
  std::int64_t group;       // tokens whose inputs are used together
  std::int64_t group_rows;  // rows that the groups use one after the other
  const void* x_T[kTokenTile];
  char* y;  // output of the first token of the pass

  void rows(std::int64_t block) const {
    const TraceSpan span(Stage::kLinearRows, block);
    const std::int64_t begin = block * block_rows, end = std::min(args.rows, begin + block_rows);
    for (std::int64_t r = begin; r < end; r += group_rows)
      for (std::int64_t t = 0; t < tokens; t += group)
        some_rows(r, std::min(end, r + group_rows), t, std::min(group, tokens - t));
  }

  // Rows [begin, end) times `count_T` tokens from `first_t` on; the first group of tokens prefetches the next rows.
  void some_rows(std::int64_t begin, std::int64_t end, std::int64_t first_t, std::int64_t count_T) const {
    const std::int64_t ahead = (kAheadBytes / (kDotRows * row_bytes) + 1) * kDotRows;
    const auto* weights = static_cast<const char*>(args.weights);
    float out_RT[kDotRows * kTokenTile];
    const std::int64_t y_bytes = pi2::row_bytes(args.x_dtype, 1);
    for (std::int64_t r = begin; r < end; r += kDotRows) {
      const std::int64_t count = std::min(kDotRows, end - r);
      const bool more = first_t == 0 && r + ahead + count <= args.rows;
      const RowsAhead some(weights + r * row_bytes, row_bytes, count, ahead, more);
      dot(some.now, count, x_T + first_t, count_T, args.columns, out_RT, some.next());
      for (std::int64_t k = 0; k < count; ++k) {
        for (std::int64_t t = 0; t < count_T; ++t) {
          const float value = out_RT[k * count_T + t] + (args.bias == nullptr ? 0.0f : args.bias[r + k]);
          narrow(&value, y + ((first_t + t) * args.rows + r + k) * y_bytes, args.x_dtype, 1);
        }
      }
    }
  }
};

// Up to kBlocksTokens tokens times rows in blocks, which are read once for all tokens.
struct BlocksPass {
  const LinearArgs& args;
  PrepareFn prepare;
  DotBlocksFn dot;
  std::int64_t first_t, tokens, item_blocks;
  float* plain_TW;           // room for inputs that are not float32
  void* x_T[kBlocksTokens];  // prepared

  std::int64_t blocks() const { return args.rows / kPanelRows; }
  std::int64_t items() const { return (blocks() + item_blocks - 1) / item_blocks; }

  void input(std::int64_t t) const {
    const char* x = static_cast<const char*>(args.x) + (first_t + t) * row_bytes(args.x_dtype, args.columns);
    if (args.x_dtype == DType::kF32) return prepare(reinterpret_cast<const float*>(x), args.columns, x_T[t]);
    float* plain = plain_TW + t * padded(args.columns);
    widen(x, args.x_dtype, plain, args.columns);
    prepare(plain, args.columns, x_T[t]);
  }

  void rows(std::int64_t index) const {
    const TraceSpan span(Stage::kLinearRows, index);
    const std::int64_t end = std::min(blocks(), (index + 1) * item_blocks);
    // Many tokens are bound by arithmetic: two blocks share the inputs. Few are bound by memory: one block is one
    // stream.
    const std::int64_t most = tokens < kTwoBlocksFrom ? 1 : kGemmPanels;
    for (std::int64_t b = index * item_blocks, count = 0; b < end; b += count) {
      count = std::min(most, end - b);
      float out_TR[kBlocksTokens * kGemmPanels * kPanelRows];
      const std::int64_t first = b * kPanelRows, width = count * kPanelRows;
      dot(static_cast<const char*>(args.weights) + first * row_bytes(args.w_dtype, args.columns), count, x_T, tokens,
          args.columns, out_TR, width);
      for (std::int64_t t = 0; t < tokens; ++t) {
        float* out = out_TR + t * width;
        for (std::int64_t r = 0; args.bias != nullptr && r < width; ++r) out[r] += args.bias[first + r];
        char* y = static_cast<char*>(args.y) + row_bytes(args.x_dtype, (first_t + t) * args.rows + first);
        narrow(out, y, args.x_dtype, width);
      }
    }
  }
};

// Of rows of `bytes` in all. Prompts are bound by arithmetic: many items balance. Fewer tokens are bound by memory, and
// between items nothing is prefetched.
std::int64_t items_of(std::int64_t bytes, std::int64_t tokens, std::int64_t threads) {
  if (tokens >= kGemmTokens) return threads * kPromptItems;
  return threads * std::max<std::int64_t>(1, std::min(kItems, bytes / (threads * kItemBytes)));
}

void linear_blocks(const LinearArgs& args, const KernelTable& table, const ParallelFor& parallel) {
  const int w = static_cast<int>(args.w_dtype);
  // Inputs that are not float32 take more memory, and then fewer tokens share a pass.
  const std::int64_t most = args.x_dtype == DType::kF32 ? kBlocksTokens : kBlocksTokens / 2;
  const std::int64_t tile = std::min(most, args.tokens), width = gemm_input_bytes(args.columns) / 4;
  const std::int64_t blocks = args.rows / kPanelRows, threads = std::max(1, parallel.threads);
  const std::int64_t items = items_of(args.rows * row_bytes(args.w_dtype, args.columns), args.tokens, threads);
  const std::int64_t share = std::max<std::int64_t>(1, std::min<std::int64_t>(64, (blocks + items - 1) / items));
  const std::int64_t item_blocks = args.tokens < kTwoBlocksFrom ? share : (share + 1) / 2 * 2;
  const std::int64_t plain = args.x_dtype == DType::kF32 ? 0 : padded(args.columns);
  float* x_TW = scratch(Scratch::kInput, tile * (width + plain));
  for (std::int64_t start = 0; start < args.tokens; start += tile) {
    const std::int64_t tokens = std::min(tile, args.tokens - start);
    BlocksPass pass{args,   table.prepare_gemm[w], table.dot_blocks[w], start,
                    tokens, item_blocks,           x_TW + tile * width, {}};
    for (std::int64_t t = 0; t < tokens; ++t) pass.x_T[t] = x_TW + t * width;
    Dynamic::run(
        tokens < kGemmTokens ? serial() : parallel, tokens,
        [](void* p, std::int64_t t) { static_cast<const BlocksPass*>(p)->input(t); }, &pass);
    const bool tiny = tokens * args.rows * args.columns < kTinyWeights;
    Dynamic::run(
        tiny ? serial() : parallel, pass.items(),
        [](void* p, std::int64_t index) { static_cast<const BlocksPass*>(p)->rows(index); }, &pass);
  }
}

// Layers of one x; their items, one layer after the other.
struct Together {
  BlocksPass* pass[kMostTogether];
  std::int64_t end[kMostTogether];  // items of the layers up to this one

  void rows(std::int64_t index) const {
    int i = 0;
    while (index >= end[i]) ++i;
    pass[i]->rows(i == 0 ? index : index - end[i - 1]);
  }
};

}  // namespace

bool takes_blocks(DType dtype) { return kernels().dot_blocks[static_cast<int>(dtype)] != nullptr; }

void linear(const LinearArgs& args, const ParallelFor& parallel) {
  const Timed timed(Timed::kLinear, args.rows, args.columns);
  const TraceSpan span(Stage::kLinear, args.rows, args.columns);
  const KernelTable& table = kernels();
  if (args.blocks) return linear_blocks(args, table, parallel);
  if (takes_panels(table, args.w_dtype, args.int8_activations, args.tokens))
    return linear_prompt(args, table, parallel);
  const int w = static_cast<int>(args.w_dtype);
  const std::int64_t width = padded(args.columns), tile = std::min(kTokenTile, args.tokens);
  float* x_TW = scratch(Scratch::kInput, (tile + 1) * width);
  float* plain = x_TW + tile * width;
  const PrepareFn prepare = args.int8_activations ? table.prepare_a8[w] : table.prepare[w];
  const DotFn dot = args.int8_activations ? table.dot_a8[w] : table.dot[w];
  const std::int64_t x_bytes = row_bytes(args.x_dtype, args.columns), y_bytes = row_bytes(args.x_dtype, args.rows);
  const std::int64_t share = args.rows / (4 * std::max(1, parallel.threads));
  const std::int64_t block_rows = std::max<std::int64_t>(32, std::min<std::int64_t>(512, share / 2 * 2));
  const std::int64_t w_bytes = row_bytes(args.w_dtype, args.columns);
  // At least the tile of the dot kernels.
  const std::int64_t group = args.int8_activations ? std::max<std::int64_t>(4, kInputBytes / (2 * width) / 4 * 4)
                                                   : std::max<std::int64_t>(2, kInputBytes / (4 * width) / 2 * 2);
  const std::int64_t group_rows = std::max(kDotRows, kPassBytes / w_bytes / kDotRows * kDotRows);
  for (std::int64_t start = 0; start < args.tokens; start += tile) {
    Pass pass{args, dot, 0, w_bytes, block_rows, group, group_rows, {}, nullptr};
    pass.tokens = std::min(tile, args.tokens - start);
    if (pass.tokens <= group) pass.group_rows = block_rows;
    pass.y = static_cast<char*>(args.y) + start * y_bytes;
    for (std::int64_t t = 0; t < pass.tokens; ++t) {
      widen(static_cast<const char*>(args.x) + (start + t) * x_bytes, args.x_dtype, plain, args.columns);
      prepare(plain, args.columns, x_TW + t * width);
      pass.x_T[t] = x_TW + t * width;
    }
    const bool tiny = pass.tokens * args.rows * args.columns < kTinyWeights;
    Dynamic::run(
        tiny ? serial() : parallel, (args.rows + block_rows - 1) / block_rows,
        [](void* p, std::int64_t block) { static_cast<const Pass*>(p)->rows(block); }, &pass);
  }
}

void linear_together(const LinearArgs* all, int count, const ParallelFor& parallel) {
  const std::int64_t tokens = all->tokens, columns = all->columns, width = gemm_input_bytes(columns) / 4;
  std::int64_t bytes = 0, rows = 0;
  for (int i = 0; i < count; ++i) {
    rows += all[i].rows;
    bytes += all[i].rows * row_bytes(all[i].w_dtype, columns);
  }
  const Timed timed(Timed::kLinear, rows, columns);
  const TraceSpan span(Stage::kLinear, rows, columns);
  const KernelTable& table = kernels();
  const std::int64_t items = items_of(bytes, tokens, std::max(1, parallel.threads));
  float* x_TW = scratch(Scratch::kInput, tokens * (count * width + padded(columns)));
  std::vector<BlocksPass> passes;
  passes.reserve(kMostTogether);
  Together together{};
  std::int64_t end = 0;
  for (int i = 0; i < count; ++i) {
    const int w = static_cast<int>(all[i].w_dtype);
    const std::int64_t block_bytes = kPanelRows * row_bytes(all[i].w_dtype, columns);
    const std::int64_t item_blocks = std::max<std::int64_t>(1, (bytes / items + block_bytes - 1) / block_bytes);
    passes.push_back({all[i],
                      table.prepare_gemm[w],
                      table.dot_blocks[w],
                      0,
                      tokens,
                      item_blocks,
                      x_TW + tokens * count * width,
                      {}});
    BlocksPass& pass = passes.back();
    const auto same = std::find_if(passes.begin(), passes.end(),
                                   [&](const BlocksPass& other) { return other.prepare == pass.prepare; });
    for (std::int64_t t = 0; t < tokens; ++t) {
      pass.x_T[t] = &*same == &pass ? x_TW + (i * tokens + t) * width : same->x_T[t];
      if (&*same == &pass) pass.input(t);
    }
    together.pass[i] = &pass;
    together.end[i] = end += pass.items();
  }
  Dynamic::run(
      tokens * rows * columns < kTinyWeights ? serial() : parallel, end,
      [](void* p, std::int64_t index) { static_cast<const Together*>(p)->rows(index); }, &together);
}

}  // namespace pi2
