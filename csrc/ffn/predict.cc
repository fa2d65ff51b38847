// The low-rank predictor: two matrices read once, in one parallel region.
#include <algorithm>
#include <atomic>
#include <thread>

#include "base/convert.h"
#include "base/scratch.h"
#include "base/timings.h"
#include "base/trace.h"
#include "ffn/activation.h"
#include "ffn/rows_ahead.h"
#include "pi2/kernels.h"
#include "pi2/predict.h"

namespace pi2 {
namespace {

constexpr std::int64_t kItemBytes =
    1 << 17;                                // of a matrix per work item: long enough to stream, short enough to balance
constexpr std::int64_t kAheadBytes = 8192;  // prefetch distance: memory latency is about 200 ns
constexpr std::int64_t kTinyMacs = 1 << 17;

// `count` contiguous rows of n numbers, with the scales and biases of their dot products.
struct Matrix {
  const char* rows;
  std::int64_t count, n, row_bytes;
  const float* scale;
  const float* bias;
  std::int64_t skipped = 0;  // in blocks: rows of the first block that do not belong to `count`

  std::int64_t rows_per_item() const {
    return std::max<std::int64_t>(16, kItemBytes / std::max<std::int64_t>(1, row_bytes) / 16 * 16);
  }
  std::int64_t items() const { return (skipped + count + rows_per_item() - 1) / rows_per_item(); }
};

struct Pass {
  const LowrankArgs& args;
  DotFn dot;
  DotBlocksFn dot_blocks;  // null: rows are not stored in blocks
  PrepareFn prepare;       // null where the dot takes plain floats
  Matrix a, b;
  std::int64_t tokens, width;  // of z, in floats per token
  const void* x_T[kPassTokens];
  float* z_Tr;  // plain
  float* z_TW;  // prepared; z_Tr itself if nothing has to be prepared
  const void* z_T[kPassTokens];
  std::uint8_t* active;  // mask of the first token of the pass

  // Calls use(row, token, values, count) for the rows of one work item, some consecutive rows at a time.
  template <class Use>
  void item(const Matrix& m, std::int64_t index, const void* const* v_T, Use use) const {
    const std::int64_t begin = index * m.rows_per_item(), end = std::min(m.count, begin + m.rows_per_item());
    const std::int64_t ahead = std::max(kDotRows, kAheadBytes / std::max<std::int64_t>(1, m.row_bytes));
    float out_RT[kDotRows * kPassTokens];
    for (std::int64_t r = begin; r < end; r += kDotRows) {
      const std::int64_t count = std::min(kDotRows, end - r);
      // Prefetches beyond this item, too: its next owner finds the start in the shared cache.
      const bool more = r + ahead + count <= m.count;
      const RowsAhead some(m.rows + r * m.row_bytes, m.row_bytes, count, ahead, more);
      dot(some.now, count, v_T, tokens, m.n, out_RT, some.next());
      for (std::int64_t k = 0; k < count; ++k) {
        const float scale = m.scale == nullptr ? 1.0f : m.scale[r + k];
        const float bias = m.bias == nullptr ? 0.0f : m.bias[r + k];
        for (std::int64_t t = 0; t < tokens; ++t) {
          const float value = out_RT[k * tokens + t] * scale + bias;
          use(r + k, t, &value, 1);
        }
      }
    }
  }

  // The same for rows in blocks; items begin with a block.
  template <class Use>
  void blocks_item(const Matrix& m, std::int64_t index, const void* const* v_T, Use use) const {
    const std::int64_t all = m.skipped + m.count, begin = index * m.rows_per_item();
    const std::int64_t end = std::min(all, begin + m.rows_per_item());
    const std::int64_t step = tokens == 1 ? kPanelRows : kGemmPanels * kPanelRows;  // one token: one stream
    float out_TR[kPassTokens * kGemmPanels * kPanelRows];
    for (std::int64_t r = begin; r < end; r += step) {
      const std::int64_t blocks = std::min(step, end - r + kPanelRows - 1) / kPanelRows, width = blocks * kPanelRows;
      dot_blocks(m.rows + r * m.row_bytes, blocks, v_T, tokens, m.n, out_TR, width);
      const std::int64_t first = std::max(r, m.skipped), last = std::min(end, r + width);
      for (std::int64_t t = 0; t < tokens; ++t) {
        float* values = out_TR + t * width + first - r;
        for (std::int64_t k = 0; m.bias != nullptr && k < last - first; ++k) values[k] += m.bias[first - m.skipped + k];
        use(first - m.skipped, t, values, last - first);
      }
    }
  }

  template <class Use>
  void some_rows(const Matrix& m, std::int64_t index, const void* const* v_T, Use use) const {
    if (dot_blocks != nullptr) return blocks_item(m, index, v_T, use);
    item(m, index, v_T, use);
  }

  void project(std::int64_t index) const {
    some_rows(a, index, x_T, [this](std::int64_t r, std::int64_t t, const float* values, std::int64_t count) {
      float* z = z_Tr + t * args.rank + r;
      for (std::int64_t k = 0; k < count; ++k) z[k] = activate(Activation::kRelu, values[k]);
    });
  }

  void prepare_z() const {
    if (prepare == nullptr) return;
    for (std::int64_t t = 0; t < tokens; ++t) prepare(z_Tr + t * args.rank, args.rank, z_TW + t * width);
  }

  void score(std::int64_t index) const {
    some_rows(b, index, z_T, [this](std::int64_t c, std::int64_t t, const float* values, std::int64_t count) {
      std::uint8_t* wanted = active + t * args.cold + c;
      const float threshold = args.threshold;  // bytes may be anything for the compiler, what `this` holds too
      for (std::int64_t k = 0; k < count; ++k) wanted[k] = !(values[k] < threshold);
      const float sure = threshold + args.doubt;
      for (std::int64_t k = 0; args.doubt > 0 && k < count; ++k)
        if (wanted[k] != 0 && values[k] < sure) wanted[k] = kIfThere;
    });
  }
};

// Both matrices in one parallel region: a second fork would cost as much as a small predictor. The worker that finishes
// the last item of `a` prepares z. Workers only wait for items that another worker is computing.
struct Work {
  const Pass& pass;
  std::atomic<std::int64_t> next_a{0}, done_a{0}, next_b{0};
  std::atomic<bool> ready{pass.a.items() == 0};  // rank 0: no last item, no z

  void run() {
    const TraceSpan span(Stage::kPredictRows);
    const std::int64_t items_a = pass.a.items(), items_b = pass.b.items();
    for (std::int64_t i = next_a.fetch_add(1); i < items_a; i = next_a.fetch_add(1)) {
      pass.project(i);
      if (done_a.fetch_add(1, std::memory_order_acq_rel) + 1 == items_a) {
        pass.prepare_z();
        ready.store(true, std::memory_order_release);
      }
    }
    while (!ready.load(std::memory_order_acquire)) std::this_thread::yield();
    for (std::int64_t i = next_b.fetch_add(1); i < items_b; i = next_b.fetch_add(1)) pass.score(i);
  }
};

}  // namespace

void predict_lowrank(const LowrankArgs& args, const ParallelFor& parallel) {
  const Timed timed(Timed::kPredictor, args.cold, args.hidden);
  const TraceSpan span(Stage::kPredict, args.cold, args.tokens);
  if (args.tokens == 0 || args.cold == 0) return;
  const KernelTable& table = kernels();
  const int w = static_cast<int>(args.dtype);
  const bool quantized = is_quantized(args.dtype);
  const PrepareFn prepare = args.blocks             ? table.prepare_gemm[w]
                            : args.int8_activations ? table.prepare_a8[w]
                                                    : table.prepare[w];
  const DotFn dot = args.int8_activations ? table.dot_a8[w] : table.dot[w];
  const std::int64_t tile = std::min(kPassTokens, args.tokens);
  const auto width = [&](std::int64_t n) {
    return args.blocks ? gemm_input_bytes(n) / 4 : quantized ? padded(n) : n;  // floats of an input
  };
  const std::int64_t x_width = width(args.hidden), z_width = width(args.rank);
  // Prepared vectors first: they must be aligned.
  float* x_TW = scratch(Scratch::kInput, tile * (x_width + z_width + args.rank) + args.hidden);
  float* z_TW = x_TW + tile * x_width;
  float* z_Tr = quantized ? z_TW + tile * z_width : z_TW;
  float* plain_H = z_TW + tile * (z_width + args.rank);
  const std::int64_t x_bytes = row_bytes(args.x_dtype, args.hidden);
  for (std::int64_t start = 0; start < args.tokens; start += tile) {
    const auto matrix = [&](const void* rows, std::int64_t count, std::int64_t n, const float* scale,
                            const float* bias) {
      return Matrix{static_cast<const char*>(rows), count, n, row_bytes(args.dtype, n), scale, bias};
    };
    const std::int64_t skipped = args.skipped % kPanelRows, b_bytes = row_bytes(args.dtype, args.rank);
    const char* b = static_cast<const char*>(args.b) + (args.skipped - skipped) * b_bytes;
    Pass pass{args,
              dot,
              args.blocks ? table.dot_blocks[w] : nullptr,
              prepare,
              matrix(args.a, args.rank, args.hidden, args.a_scale, nullptr),
              matrix(b, args.cold, args.rank, args.b_scale, args.b_bias),
              std::min(tile, args.tokens - start),
              z_width,
              {},
              z_Tr,
              z_TW,
              {},
              args.active + start * args.cold};
    pass.b.skipped = skipped;
    for (std::int64_t t = 0; t < pass.tokens; ++t) {
      const char* x = static_cast<const char*>(args.x) + (start + t) * x_bytes;
      widen(x, args.x_dtype, quantized ? plain_H : x_TW + t * x_width, args.hidden);
      if (quantized) prepare(plain_H, args.hidden, x_TW + t * x_width);
      pass.x_T[t] = x_TW + t * x_width;
      pass.z_T[t] = z_TW + t * z_width;
    }
    Work work{pass};
    // Waking a thread costs a few microseconds: not worth it for less arithmetic.
    const bool tiny = pass.tokens * args.rank * (args.hidden + args.cold) < kTinyMacs;
    const std::int64_t most = std::max(pass.a.items(), pass.b.items());
    const std::int64_t workers = tiny ? 1 : std::min<std::int64_t>(std::max(1, parallel.threads), most);
    parallel.run(parallel.host, workers, [](void* w, std::int64_t) { static_cast<Work*>(w)->run(); }, &work);
  }
}

}  // namespace pi2
