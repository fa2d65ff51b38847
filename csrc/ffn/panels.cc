#include "ffn/panels.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "base/convert.h"
#include "base/scratch.h"
#include "base/trace.h"
#include "ffn/activation.h"
#include "ffn/counters.h"
#include "ffn/down_queue.h"
#include "ffn/firing.h"

namespace pi2 {
namespace {

constexpr std::int64_t kTokenTile = 128;  // tokens per pass: their inputs share the second-level cache with panels
constexpr std::int64_t kChunkNeurons = kPromptNeurons;
constexpr std::int64_t kDownColumns = 128;  // of one work item of a dense down product
// One in so many neurons of a chunk: a token that fires them goes through the matrix product, which is then faster than
// adding row by row. A matter of each token alone, so that its bits do not depend on the others.
constexpr std::int64_t kDenseOneIn = 4;
constexpr std::int64_t kPair = kGemmPanels * kPanelRows;

// What one thread needs for itself.
struct Bench {
  char* panels[kGemmPanels];
  float* out;  // [tokens, kPair]
};

// The scratch of a pass and the threads that work on it.
class Workshop {
 public:
  // For `tokens` inputs, of which `tile` at a time.
  Workshop(const ParallelFor& parallel, std::int64_t columns, std::int64_t tokens, std::int64_t tile)
      : parallel_(parallel), workers_(std::max(1, parallel.threads)), columns_(columns) {
    const std::int64_t panel_floats = panel_bytes(columns) / 4,
                       bench_floats = kGemmPanels * panel_floats + tile * kPair;
    const std::int64_t inputs_floats = tokens * gemm_input_bytes(columns) / 4;
    float* at = scratch(Scratch::kInput, inputs_floats + workers_ * (bench_floats + padded(columns)));
    inputs_ = reinterpret_cast<char*>(at);
    at += inputs_floats;
    for (std::int64_t w = 0; w < std::min<std::int64_t>(workers_, kMostWorkers); ++w, at += bench_floats) {
      for (std::int64_t p = 0; p < kGemmPanels; ++p)
        benches_[w].panels[p] = reinterpret_cast<char*>(at + p * panel_floats);
      benches_[w].out = at + kGemmPanels * panel_floats;
      plain_[w] = at + bench_floats;
      at += padded(columns);
    }
    workers_ = std::min<std::int64_t>(workers_, kMostWorkers);
  }

  // work(worker, index) for every index, on all threads.
  template <class Body>
  void each(std::int64_t n, const Body& work) {
    struct Shared {
      const Body& work;
      std::int64_t n;
      std::atomic<std::int64_t> next{0};
    } shared{work, n, {}};
    parallel_.run(
        parallel_.host, std::min(workers_, n),
        [](void* context, std::int64_t worker) {
          auto& s = *static_cast<Shared*>(context);
          for (std::int64_t i = s.next.fetch_add(1); i < s.n; i = s.next.fetch_add(1)) s.work(worker, i);
        },
        &shared);
  }

  // x [tokens, columns] as gemm wants it.
  void prepare(const char* x, DType x_dtype, std::int64_t tokens, PrepareFn prepare) {
    each(tokens, [&](std::int64_t worker, std::int64_t t) {
      widen(x + t * row_bytes(x_dtype, columns_), x_dtype, plain_[worker], columns_);
      prepare(plain_[worker], columns_, inputs_ + t * gemm_input_bytes(columns_));
    });
    for (std::int64_t t = 0; t < tokens; ++t) x_T_[t] = inputs_ + t * gemm_input_bytes(columns_);
  }

  const void* const* x_T() const { return x_T_; }
  Bench& bench(std::int64_t worker) { return benches_[worker]; }
  float* plain(std::int64_t worker) { return plain_[worker]; }

 private:
  static constexpr std::int64_t kMostWorkers = 64;
  const ParallelFor& parallel_;
  std::int64_t workers_, columns_;
  char* inputs_;
  Bench benches_[kMostWorkers];
  float* plain_[kMostWorkers];
  const void* x_T_[kPromptTokens];
};

// Unpacks the rows row(0) to row(count - 1), of which the last stands for what is missing of kPanelRows.
template <class Row>
void unpack(PanelFn panel, const Row& row, std::int64_t count, std::int64_t n, char* out) {
  const void* rows[kPanelRows];
  for (std::int64_t r = 0; r < kPanelRows; ++r) rows[r] = row(std::min(r, count - 1));
  panel(rows, n, out);
}

}  // namespace

bool takes_panels(const KernelTable& table, DType w_dtype, bool int8_activations, std::int64_t tokens) {
  return int8_activations && tokens >= kGemmTokens && table.panel[static_cast<int>(w_dtype)] != nullptr;
}

void linear_prompt(const LinearArgs& args, const KernelTable& table, const ParallelFor& parallel) {
  const int w = static_cast<int>(args.w_dtype);
  const std::int64_t tile = std::min(kTokenTile, args.tokens), w_bytes = row_bytes(args.w_dtype, args.columns);
  const std::int64_t x_bytes = row_bytes(args.x_dtype, args.columns), y_bytes = row_bytes(args.x_dtype, 1);
  Workshop shop(parallel, args.columns, tile, tile);
  for (std::int64_t start = 0; start < args.tokens; start += tile) {
    const std::int64_t tokens = std::min(tile, args.tokens - start);
    shop.prepare(static_cast<const char*>(args.x) + start * x_bytes, args.x_dtype, tokens, table.prepare_gemm[w]);
    shop.each((args.rows + kPair - 1) / kPair, [&](std::int64_t worker, std::int64_t pair) {
      Bench& bench = shop.bench(worker);
      const std::int64_t first = pair * kPair, count = std::min(kPair, args.rows - first);
      const std::int64_t panels = (count + kPanelRows - 1) / kPanelRows;
      for (std::int64_t p = 0; p < panels; ++p) {
        const char* weights = static_cast<const char*>(args.weights) + (first + p * kPanelRows) * w_bytes;
        unpack(
            table.panel[w], [&](std::int64_t r) { return weights + r * w_bytes; },
            std::min(kPanelRows, count - p * kPanelRows), args.columns, bench.panels[p]);
      }
      const void* unpacked[kGemmPanels] = {bench.panels[0], bench.panels[1]};
      table.gemm(unpacked, panels, shop.x_T(), tokens, args.columns, bench.out, kPair);
      for (std::int64_t t = 0; t < tokens; ++t) {
        float* out = bench.out + t * kPair;
        if (args.bias != nullptr)
          for (std::int64_t r = 0; r < count; ++r) out[r] += args.bias[first + r];
        narrow(out, static_cast<char*>(args.y) + ((start + t) * args.rows + first) * y_bytes, args.x_dtype, count);
      }
    });
  }
}

namespace {

// Up to kTokenTile tokens on their way through a layer.
struct PromptPass {
  const FfnArgs& args;
  const KernelTable& table;
  Workshop& shop;
  const void* const* x_T;  // prepared
  std::int64_t tokens, width;
  float* h_TC;                   // [tokens, kChunkNeurons] of the chunk at hand
  float* y_TW;                   // [tokens, width], in the order of the axpy kernel
  float* w_CW;                   // [kChunkNeurons, width], the same order
  const char* const* where;      // of a source, or null
  const FiringCounters* firing;  // null: nobody watches

  const char* rows_of(std::int64_t neuron) const {
    if (where != nullptr) return where[neuron];
    return static_cast<const char*>(args.neuron_rows) + neuron * args.rows * row_bytes(args.w_dtype, args.hidden);
  }

  float bias(const void* values, std::int64_t neuron) const {
    return values == nullptr ? 0.0f : static_cast<const float*>(values)[neuron];
  }

  // h of kPanelRows neurons of the chunk [begin, end) for every token: 0 where one does not fire.
  void gate_and_up(std::int64_t worker, std::int64_t begin, std::int64_t end, std::int64_t block,
                   Counters* done) const {
    Bench& bench = shop.bench(worker);
    const int w = static_cast<int>(args.w_dtype);
    const std::int64_t first = begin + block * kPanelRows, count = std::min(kPanelRows, end - first);
    const std::int64_t w_bytes = row_bytes(args.w_dtype, args.hidden), panels = args.rows - 1;
    for (std::int64_t p = 0; p < panels; ++p)
      unpack(
          table.panel[w], [&](std::int64_t r) { return rows_of(first + r) + p * w_bytes; }, count, args.hidden,
          bench.panels[p]);
    const void* unpacked[kGemmPanels] = {bench.panels[0], bench.panels[1]};
    table.gemm(unpacked, panels, x_T, tokens, args.hidden, bench.out, kPair);
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int64_t neuron = first + r;
      const float bias_first = bias(panels == 2 ? args.bias_gate : args.bias_up, neuron);
      const float bias_up = panels == 2 ? bias(args.bias_up, neuron) : 0.0f;
      const float threshold = neuron < args.n_hot ? 0.0f : args.threshold;
      std::uint64_t fired[kTokenTile / 64] = {};
      for (std::int64_t t = 0; t < tokens; ++t) {
        const float* out = bench.out + t * kPair;
        float h = activate(args.activation, out[r] + bias_first), score = h;
        if (std::fabs(h) <= threshold) {  // written so that NaN fires
          h = score = 0;
        } else if (panels == 2) {
          const float up = out[kPanelRows + r] + bias_up;
          h *= args.activation_on_up ? activate(args.activation, up) : up;
          if (args.activation_on_up) score = h;
        }
        h_TC[t * kChunkNeurons + (first - begin) + r] = h;
        done->down_rows += h != 0.0f;
        if (firing != nullptr)
          fired[t / 64] |= static_cast<std::uint64_t>(!(std::fabs(score) <= firing->cut)) << t % 64;
      }
      for (std::int64_t i = 0; firing != nullptr && 64 * i < tokens; ++i)
        if (fired[i] != 0) firing->add(neuron, fired[i]);
    }
    done->gate_rows += count * tokens;
    if (panels == 2) done->up_rows += count * tokens;
  }

  const char* down(std::int64_t neuron) const {
    return rows_of(neuron) + (args.rows - 1) * row_bytes(args.w_dtype, args.hidden);
  }

  float* h(std::int64_t t) const { return h_TC + t * kChunkNeurons; }
  float* y(std::int64_t t) const { return y_TW + t * width; }

  // How many of the chunk's neurons fire for a token.
  std::int64_t fired(std::int64_t t, std::int64_t count) const { return count - std::count(h(t), h(t) + count, 0.0f); }

  // Few fire: only their rows, added to one token.
  void add_down(std::int64_t t, std::int64_t begin, std::int64_t count) const {
    const AxpyFn axpy = table.axpy[static_cast<int>(args.w_dtype)];
    DownQueue queue;
    for (std::int64_t i = 0; i < count; ++i)
      if (h(t)[i] != 0.0f) queue.add(axpy, args.hidden, down(begin + i), h(t)[i], y(t));
    queue.flush(axpy, args.hidden, y(t));
  }

  // Many fire: down rows of kPanelRows neurons as floats (0 + 1 * row is exact), once for all tokens...
  void widen_down(std::int64_t begin, std::int64_t block, std::int64_t count) const {
    const float one = 1;
    for (std::int64_t i = block * kPanelRows; i < std::min(count, (block + 1) * kPanelRows); ++i) {
      const void *row = down(begin + i), *next = down(begin + std::min(i + 1, count - 1));
      std::memset(w_CW + i * width, 0, static_cast<std::size_t>(width) * sizeof(float));
      table.axpy[static_cast<int>(args.w_dtype)](w_CW + i * width, &row, &one, 1, args.hidden, &next);
    }
  }

  // Adds what the neurons [begin, begin + count) contribute. `widened`: their down rows are floats already; set when
  // they are.
  void add_chunk(std::int64_t begin, std::int64_t count, bool* widened) const {
    const std::int64_t blocks = (count + kPanelRows - 1) / kPanelRows;
    shop.each(blocks, [&](std::int64_t worker, std::int64_t block) {
      Counters done;
      gate_and_up(worker, begin, begin + count, block, &done);
      pi2::count(done);
    });
    std::int64_t few[kTokenTile], n_few = 0, n_many = 0;
    const float* h_T[kTokenTile];
    float* y_T[kTokenTile];
    for (std::int64_t t = 0; t < tokens; ++t) {
      if (kDenseOneIn * fired(t, count) < count) {
        few[n_few++] = t;
      } else {
        h_T[n_many] = h(t);
        y_T[n_many++] = y(t);
      }
    }
    if (n_few > 0) shop.each(n_few, [&](std::int64_t, std::int64_t i) { add_down(few[i], begin, count); });
    if (n_many == 0) return;
    if (!*widened) shop.each(blocks, [&](std::int64_t, std::int64_t block) { widen_down(begin, block, count); });
    *widened = true;
    shop.each((width + kDownColumns - 1) / kDownColumns, [&](std::int64_t, std::int64_t block) {
      const std::int64_t first = block * kDownColumns;
      table.addmm(h_T, w_CW, width, count, first, std::min(kDownColumns, width - first), y_T, n_many);
    });
  }

  void finish(std::int64_t worker, std::int64_t t, char* out) const {
    float* plain = shop.plain(worker);
    table.restore[static_cast<int>(args.w_dtype)](y(t), args.hidden, plain);
    if (args.bias_down != nullptr)
      for (std::int64_t k = 0; k < args.hidden; ++k) plain[k] += static_cast<const float*>(args.bias_down)[k];
    narrow(plain, out + t * row_bytes(args.x_dtype, args.hidden), args.x_dtype, args.hidden);
  }
};

// The layer's neurons from args.first on, chunk after chunk.
struct Chunks {
  const std::int64_t first, base, neurons, count;

  explicit Chunks(const FfnArgs& args)
      : first(args.first),
        base(chunk_base(args.first)),
        neurons(args.neurons),
        count((neurons - base + kChunkNeurons - 1) / kChunkNeurons) {}

  std::int64_t begin(std::int64_t chunk) const { return std::max(first, base + chunk * kChunkNeurons); }
  std::int64_t size(std::int64_t chunk) const {
    return std::min(neurons, base + (chunk + 1) * kChunkNeurons) - begin(chunk);
  }
};

// All of them from a source. `ids` has room for kChunkNeurons and a count for each chunk.
void begin_all(NeuronSource& source, const Chunks& chunks, bool last, std::int64_t* ids) {
  std::int64_t* counts = ids + chunks.count * kChunkNeurons;
  for (std::int64_t c = 0; c < chunks.count; ++c) {
    counts[c] = chunks.size(c);
    for (std::int64_t i = 0; i < counts[c]; ++i) ids[c * kChunkNeurons + i] = chunks.begin(c) + i;
  }
  source.expect(chunks.count, true, last);
  source.begin(ids, counts, kChunkNeurons, chunks.count);
}

}  // namespace

// Chunks of neurons, each for every tile of tokens: then a chunk is read once, from memory or from flash.
void ffn_prompt(const FfnArgs& args, const KernelTable& table, const ParallelFor& parallel) {
  const std::int64_t most = std::min(kPromptTokens, args.tokens), tile = std::min(kTokenTile, args.tokens);
  const std::int64_t width = padded(args.hidden), x_bytes = row_bytes(args.x_dtype, args.hidden);
  const Chunks chunks(args);
  Workshop shop(parallel, args.hidden, most, tile);
  float* h_TC = scratch(Scratch::kPartials, tile * kChunkNeurons + most * width + kChunkNeurons * width);
  float* y_TW = h_TC + tile * kChunkNeurons;
  float* w_CW = y_TW + most * width;
  std::int64_t* ids = nullptr;
  if (args.source != nullptr)
    ids = reinterpret_cast<std::int64_t*>(scratch(Scratch::kIds, 2 * chunks.count * (kChunkNeurons + 1)));
  FiringCall call(args);
  for (std::int64_t start = 0; start < args.tokens; start += most) {
    const std::int64_t tokens = std::min(most, args.tokens - start);
    const FiringCounters* firing = call.next(tokens);
    const auto pass = [&](std::int64_t first) {
      return PromptPass{args,
                        table,
                        shop,
                        shop.x_T() + first,
                        std::min(tile, tokens - first),
                        width,
                        h_TC,
                        y_TW + first * width,
                        w_CW,
                        args.source == nullptr ? nullptr : args.source->neuron_rows(),
                        firing};
    };
    shop.prepare(static_cast<const char*>(args.x) + start * x_bytes, args.x_dtype, tokens,
                 table.prepare_gemm[static_cast<int>(args.w_dtype)]);
    std::memset(y_TW, 0, static_cast<std::size_t>(tokens * width) * sizeof(float));
    if (args.source != nullptr) begin_all(*args.source, chunks, !args.more && start + most >= args.tokens, ids);
    for (std::int64_t c = 0; c < chunks.count; ++c) {
      if (args.source != nullptr && args.source->next() < 0) return;  // reading has failed
      const TraceSpan span(Stage::kCompute, args.layer, c);
      bool widened = false;
      for (std::int64_t first = 0; first < tokens; first += tile)
        pass(first).add_chunk(chunks.begin(c), chunks.size(c), &widened);
      if (args.source != nullptr) args.source->done(c);
    }
    if (args.source != nullptr && args.source->failed()) return;
    const PromptPass all{args, table, shop, shop.x_T(), tokens, width, h_TC, y_TW, w_CW, nullptr, nullptr};
    shop.each(tokens, [&](std::int64_t worker, std::int64_t t) {
      all.finish(worker, t, static_cast<char*>(args.y) + start * x_bytes);
    });
  }
}

}  // namespace pi2
