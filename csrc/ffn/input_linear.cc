// A linear layer whose weight lies by input channel: only the rows of channels that a token uses are read.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>

#include "base/convert.h"
#include "base/scratch.h"
#include "base/timings.h"
#include "base/trace.h"
#include "ffn/chunk_sums.h"
#include "ffn/down_queue.h"
#include "kernels/fetch_rows.h"
#include "pi2/ffn.h"
#include "pi2/kernels.h"
#include "pi2/linear.h"

namespace pi2 {
namespace {

constexpr std::int64_t kTinyMacs = 1 << 20;
constexpr std::int64_t kFirst = 2 * kAxpyRows;  // rows that DownQueue does not prefetch
constexpr std::int64_t kLeastChunk = 256;       // more partial sums cost more than they balance
constexpr std::int64_t kTogether = 64;          // channels whose rows are added for one token after the other

// At most kPassTokens tokens: chunks of channels, then columns, in one parallel region, as in sparse_ffn.
struct Pass {
  const InputLinearArgs& args;
  AxpyFn axpy, add;
  ChunkSums sums;
  std::int64_t chunk;          // channels
  const float* x_TK;           // of the first token of the pass
  const std::uint8_t* active;  // of the first token of the pass, or null
  float *partials, *y_TW;
  std::uint8_t* used;
  std::atomic<std::int64_t> next_chunk{0}, done_chunks{0}, next_block{0};

  void run() {
    for (std::int64_t c = next_chunk.fetch_add(1); c < sums.chunks; c = next_chunk.fetch_add(1)) {
      run_chunk(c);
      done_chunks.fetch_add(1, std::memory_order_release);
    }
    while (done_chunks.load(std::memory_order_acquire) < sums.chunks) std::this_thread::yield();
    for (std::int64_t b = next_block.fetch_add(1); b < sums.blocks(); b = next_block.fetch_add(1))
      sums.reduce(add, b, y_TW);
  }

  void run_chunk(std::int64_t c) const {
    const TraceSpan span(Stage::kLinearRows, c);
    const std::int64_t row = row_bytes(args.w_dtype, args.outputs), end = std::min(args.channels, (c + 1) * chunk);
    const auto* rows = static_cast<const char*>(args.weights);
    float* part_TW = partials + c * sums.tokens * sums.width;
    std::memset(part_TW, 0, static_cast<std::size_t>(sums.tokens * sums.width) * sizeof(float));
    DownQueue queue_T[kPassTokens];
    used[c] = 0;
    for (std::int64_t first = c * chunk; first < end; first += kTogether) {
      for (std::int64_t t = 0; t < sums.tokens; ++t) {
        std::int64_t ids[kTogether];
        const std::int64_t n = listed(t, first, std::min(first + kTogether, end), ids);
        if (n > 0) used[c] = 1;
        for (std::int64_t i = 0; first == c * chunk && i < std::min(n, kFirst); ++i)
          for (std::int64_t at = 0; at < row; at += 64) fetch(rows + ids[i] * row + at);
        for (std::int64_t i = 0; i < n; ++i)
          queue_T[t].add(axpy, args.outputs, rows + ids[i] * row, x_TK[t * args.channels + ids[i]],
                         part_TW + t * sums.width);
      }
    }
    for (std::int64_t t = 0; t < sums.tokens; ++t) queue_T[t].flush(axpy, args.outputs, part_TW + t * sums.width);
  }

  // The channels of [begin, end) that the token uses; without a branch: which ones is unpredictable.
  std::int64_t listed(std::int64_t t, std::int64_t begin, std::int64_t end, std::int64_t* ids) const {
    const float* x_K = x_TK + t * args.channels;
    const std::uint8_t* marks = active == nullptr ? nullptr : active + t * args.channels;
    std::int64_t n = 0;
    for (std::int64_t k = begin; k < end; ++k) {
      ids[n] = k;
      n += static_cast<std::int64_t>(!(std::fabs(x_K[k]) <= args.threshold)) & (marks == nullptr || marks[k] != 0);
    }
    return n;
  }
};

}  // namespace

void sparse_input_linear(const InputLinearArgs& args, const ParallelFor& parallel) {
  const Timed timed(Timed::kLinear, args.outputs, args.channels);
  const TraceSpan span(Stage::kLinear, args.outputs, args.channels);
  const KernelTable& table = kernels();
  const int w = static_cast<int>(args.w_dtype);
  const RestoreFn restore = table.restore[w];
  const std::int64_t width = is_quantized(args.w_dtype) ? padded(args.outputs) : args.outputs;
  const std::int64_t tile = std::min(kPassTokens, args.tokens),
                     chunk = std::max(kLeastChunk, chunk_neurons(args.channels));
  const std::int64_t chunks = (args.channels + chunk - 1) / chunk;
  float* x_TK = scratch(Scratch::kInput, tile * (args.channels + width) + args.outputs);
  float *y_TW = x_TK + tile * args.channels, *plain = y_TW + tile * width;
  float* partials = scratch(Scratch::kPartials, chunks * tile * width + chunks);
  auto* used = reinterpret_cast<std::uint8_t*>(partials + chunks * tile * width);
  const std::int64_t x_bytes = row_bytes(args.x_dtype, args.channels), y_bytes = row_bytes(args.x_dtype, args.outputs);
  for (std::int64_t start = 0; start < args.tokens; start += tile) {
    const std::int64_t tokens = std::min(tile, args.tokens - start);
    widen(static_cast<const char*>(args.x) + start * x_bytes, args.x_dtype, x_TK, tokens * args.channels);
    const std::uint8_t* active = args.active == nullptr ? nullptr : args.active + start * args.channels;
    Pass pass{args,
              table.axpy[w],
              table.axpy[static_cast<int>(DType::kF32)],
              {partials, used, chunks, tokens, width},
              chunk,
              x_TK,
              active,
              partials,
              y_TW,
              used};
    const bool tiny = tokens * args.channels * args.outputs < kTinyMacs;
    const std::int64_t workers = tiny ? 1 : std::min<std::int64_t>(std::max(1, parallel.threads), chunks);
    parallel.run(parallel.host, workers, [](void* p, std::int64_t) { static_cast<Pass*>(p)->run(); }, &pass);
    for (std::int64_t t = 0; t < tokens; ++t) {
      float* y = y_TW + t * width;
      if (restore != nullptr) {
        restore(y, args.outputs, plain);
        y = plain;
      }
      for (std::int64_t k = 0; args.bias != nullptr && k < args.outputs; ++k) y[k] += args.bias[k];
      narrow(y, static_cast<char*>(args.y) + (start + t) * y_bytes, args.x_dtype, args.outputs);
    }
  }
}

}  // namespace pi2
