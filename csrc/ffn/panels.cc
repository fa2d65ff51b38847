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

constexpr std::int64_t kTokenTile = 128;  // tokens per pass: their inputs and the panels fit the second-level cache
constexpr std::int64_t kChunkNeurons = kPromptNeurons;
constexpr std::int64_t kDownColumns = 128;  // columns per work item of a dense down product
// A token that fires at least one in kDenseOneIn neurons of a chunk uses the matrix product, which is then faster than
// adding row by row. This depends on the token alone, so that its bits do not depend on other tokens.
constexpr std::int64_t kDenseOneIn = 5;
constexpr std::int64_t kPair = kGemmPanels * kPanelRows;

// Scratch memory of one thread.
struct Bench {
  char* panels[kGemmPanels];
  float* out;  // [tokens, kPair]
};

// The scratch memory of a pass and its threads.
class Workshop {
 public:
  // For `tokens` inputs, `tile` at a time.
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

  // Calls work(worker, index) for every index, on all threads.
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

  // Prepares x [tokens, columns] on all threads; outputs are `bytes` apart.
  void prepare_all(const char* x, DType x_dtype, std::int64_t tokens, PrepareFn prepare, char* out,
                   std::int64_t bytes) {
    each(tokens, [&](std::int64_t worker, std::int64_t t) {
      widen(x + t * row_bytes(x_dtype, columns_), x_dtype, plain_[worker], columns_);
      prepare(plain_[worker], columns_, out + t * bytes);
    });
  }

  // Prepares x [tokens, columns] for gemm.
  void prepare(const char* x, DType x_dtype, std::int64_t tokens, PrepareFn prepare) {
    prepare_all(x, x_dtype, tokens, prepare, inputs_, gemm_input_bytes(columns_));
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

// Unpacks row(0) to row(count - 1); repeats the last one up to kPanelRows.
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
      table.gemm[w](unpacked, panels, shop.x_T(), tokens, args.columns, bench.out, kPair);
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

constexpr std::int64_t kTileWords = kTokenTile / 64;
constexpr std::int64_t kNeuronsAhead = 4;  // prefetch distance in neurons

// One bit per token of a tile.
struct TileBits {
  std::uint64_t words[kTileWords] = {};

  void set(std::int64_t t) { words[t / 64] |= std::uint64_t{1} << t % 64; }
};

// Computes up to kTokenTile tokens. For a token that fires few neurons of a chunk, up and down are computed neuron by
// neuron; tokens that fire many share matrix products over the whole chunk.
struct PromptPass {
  const FfnArgs& args;
  const KernelTable& table;
  Workshop& shop;
  const void* const* x_T;  // prepared for gemm
  const float* a8_TW;      // prepared for dot_a8
  std::int64_t tokens, width;
  float* h_TC;                   // [tokens, kChunkNeurons] of the current chunk: act(gate), then h
  TileBits* fired_C;             // [kChunkNeurons]: tokens for which the neuron fires
  float* y_TW;                   // [tokens, width], in axpy order
  float* w_CW;                   // [kChunkNeurons, width], in axpy order
  const char* const* where;      // neuron_rows() of the source, or null
  const FiringCounters* firing;  // null: not watched
  double* squares_T;             // layers with a norm: [tokens], of the h of the chunks so far

  const char* row_of(std::int64_t neuron, std::int64_t r) const {
    return where != nullptr ? args.row_at(where[neuron], neuron, r) : args.row_of(neuron, r);
  }

  float bias(const void* values, std::int64_t neuron) const {
    return values == nullptr ? 0.0f : static_cast<const float*>(values)[neuron];
  }

  // Row `row` of the neurons [first, first + count), at most kPair, times the inputs x_T of `n` tokens. Returns the
  // worker's scratch [n, kPair].
  const float* product(std::int64_t worker, std::int64_t first, std::int64_t count, std::int64_t row,
                       const void* const* some_T, std::int64_t n) const {
    Bench& bench = shop.bench(worker);
    const int w = static_cast<int>(args.w_dtype);
    const std::int64_t panels = (count + kPanelRows - 1) / kPanelRows;
    if (args.up_blocks) {
      table.dot_blocks[w](args.row_of(first, 0), panels, some_T, n, args.hidden, bench.out, kPair);
      return bench.out;
    }
    for (std::int64_t p = 0; p < panels; ++p)
      unpack(
          table.panel[w], [&](std::int64_t r) { return row_of(first + p * kPanelRows + r, row); },
          std::min(kPanelRows, count - p * kPanelRows), args.hidden, bench.panels[p]);
    const void* unpacked[kGemmPanels] = {bench.panels[0], bench.panels[1]};
    table.gemm[w](unpacked, panels, some_T, n, args.hidden, bench.out, kPair);
    return bench.out;
  }

  // Whether |h|, and not |act(gate)|, is compared with the cut.
  bool scores_h() const { return args.rows == 3 && args.activation_on_up; }

  // act(gate) of kPair neurons of the chunk [begin, end) for every token; 0 where they do not fire.
  void gates(std::int64_t worker, std::int64_t begin, std::int64_t end, std::int64_t block, Counters* done) const {
    const std::int64_t first = begin + block * kPair, count = std::min(kPair, end - first);
    const float* out = product(worker, first, count, 0, x_T, tokens);
    float bias_N[kPair], threshold_N[kPair];
    TileBits fired_N[kPair], scored_N[kPair];
    for (std::int64_t r = 0; r < count; ++r) {
      bias_N[r] = bias(args.rows == 3 ? args.bias_gate : args.bias_up, first + r);
      threshold_N[r] = args.threshold_of(first + r);
    }
    for (std::int64_t t = 0; t < tokens; ++t, out += kPair) {
      float* h_N = h(t) + first - begin;
      if (args.activation == Activation::kRelu && args.shaping.plain)  // the common case, which the compiler vectorises
        for (std::int64_t r = 0; r < count; ++r) h_N[r] = activate(Activation::kRelu, out[r] + bias_N[r]);
      else
        for (std::int64_t r = 0; r < count; ++r) h_N[r] = activate(args, out[r] + bias_N[r]);
      // With this comparison NaN fires.
      for (std::int64_t r = 0; r < count; ++r) h_N[r] = std::fabs(h_N[r]) <= threshold_N[r] ? 0.0f : h_N[r];
      std::uint32_t fires = 0;
      for (std::int64_t r = 0; r < count; ++r) fires |= static_cast<std::uint32_t>(h_N[r] != 0.0f) << r;
      for (; fires != 0; fires &= fires - 1) {
        const int r = __builtin_ctz(fires);
        fired_N[r].set(t);
        if (firing != nullptr && !(std::fabs(h_N[r]) <= firing->cut)) scored_N[r].set(t);
      }
    }
    std::copy_n(fired_N, count, fired_C + first - begin);
    for (std::int64_t r = 0; firing != nullptr && !scores_h() && r < count; ++r) count_fired(first + r, scored_N[r]);
    done->gate_rows += count * tokens;
  }

  void count_fired(std::int64_t neuron, const TileBits& bits) const {
    for (const std::uint64_t word : bits.words)
      if (word != 0) firing->add(neuron, word);
  }

  // Multiplies *h_T of token t, act(gate) so far, by the neuron's `up`.
  void multiply(std::int64_t t, std::int64_t neuron, float up, float* h_T, TileBits* scored) const {
    *h_T *= factor(args, args.shaping.norms() ? up : up + bias(args.bias_up, neuron));
    if (firing != nullptr && !(std::fabs(*h_T) <= firing->cut)) scored->set(t);
  }

  // The tokens of the tile that fire few, and those that fire many neurons of the chunk.
  struct Split {
    std::int64_t few_T[kTokenTile], many_T[kTokenTile], n_few = 0, n_many = 0;
    TileBits few;
    const void* many_x_T[kTokenTile];
  };

  // h = act(gate) * up of kPair neurons of the chunk, for the tokens that fire many.
  void ups_of_many(std::int64_t worker, std::int64_t begin, std::int64_t end, std::int64_t block, const Split& split,
                   Counters* done) const {
    const std::int64_t first = begin + block * kPair, count = std::min(kPair, end - first);
    const float* out = product(worker, first, count, 1, split.many_x_T, split.n_many);
    TileBits scored_N[kPair];
    for (std::int64_t i = 0; i < split.n_many; ++i, out += kPair)
      for (std::int64_t r = 0; r < count; ++r) {
        float* h_T = h(split.many_T[i]) + first - begin;
        if (h_T[r] != 0.0f) multiply(split.many_T[i], first + r, out[r], h_T + r, &scored_N[r]);
      }
    for (std::int64_t r = 0; firing != nullptr && scores_h() && r < count; ++r) {
      if (split.n_few == 0) count_fired(first + r, scored_N[r]);
      // Otherwise counted with the other tokens: the tokens of a neuron are counted together.
      TileBits& bits = fired_C[first - begin + r];
      for (std::int64_t w = 0; w < kTileWords; ++w)
        bits.words[w] = (bits.words[w] & split.few.words[w]) | scored_N[r].words[w];
    }
    done->up_rows += count * split.n_many;
  }

  // The same for the tokens of a word of 64 that fire few: their inputs stay in the second-level cache.
  void ups_of_few(std::int64_t begin, std::int64_t end, std::int64_t block, std::int64_t word, const Split& split,
                  Counters* done) const {
    const std::int64_t first = begin + block * kPair, last = std::min(end, first + kPair);
    for (std::int64_t neuron = first; neuron < last; ++neuron) {
      std::int64_t who_T[64], n = 0;
      const void* x_of[64];
      for (std::uint64_t left = fired_C[neuron - begin].words[word] & split.few.words[word]; left != 0;
           left &= left - 1) {
        who_T[n] = 64 * word + __builtin_ctzll(left);
        x_of[n] = a8_TW + who_T[n] * width;
        ++n;
      }
      TileBits scored;
      if (n > 0) {
        const void* row = row_of(neuron, 1);
        const bool more = neuron + kNeuronsAhead < end;
        const void* next = more ? row_of(neuron + kNeuronsAhead, 1) : nullptr;
        float up_T[64];
        table.dot_a8[static_cast<int>(args.w_dtype)](&row, 1, x_of, n, args.hidden, up_T, more ? &next : nullptr);
        for (std::int64_t i = 0; i < n; ++i) multiply(who_T[i], neuron, up_T[i], h(who_T[i]) + neuron - begin, &scored);
      }
      if (firing != nullptr && scores_h()) {
        scored.words[word] |= fired_C[neuron - begin].words[word] & ~split.few.words[word];
        count_fired(neuron, scored);
      }
      done->up_rows += n;
    }
  }

  // Squares and weights of the norm for the chunk's h of a token.
  void norm(std::int64_t t, std::int64_t begin, std::int64_t count) const {
    for (std::int64_t i = 0; i < count; ++i) {
      const float weight = args.bias_up == nullptr ? 1.0f : bias(args.bias_up, begin + i);
      if (h(t)[i] != 0.0f) h(t)[i] = normed(h(t)[i], weight, squares_T + t);
    }
  }

  const char* down(std::int64_t neuron) const { return row_of(neuron, args.rows - 1); }
  AxpyFn axpy() const { return table.axpy[static_cast<int>(args.dtype_of_down())]; }

  float* h(std::int64_t t) const { return h_TC + t * kChunkNeurons; }
  float* y(std::int64_t t) const { return y_TW + t * width; }

  // The number of the chunk's neurons that fire for a token.
  std::int64_t fired(std::int64_t t, std::int64_t count) const { return count - std::count(h(t), h(t) + count, 0.0f); }

  // Few fire: adds only their rows to the token.
  void add_down(std::int64_t t, std::int64_t begin, std::int64_t count) const {
    DownQueue queue;
    Counters done;
    for (std::int64_t i = 0; i < count; ++i) {
      if (h(t)[i] == 0.0f) continue;
      queue.add(axpy(), args.hidden, down(begin + i), h(t)[i], y(t));
      ++done.down_rows;
    }
    queue.flush(axpy(), args.hidden, y(t));
    pi2::count(done);
  }

  // Many fire: converts down rows of kPanelRows neurons to float (0 + 1 * row is exact), once for all tokens.
  void widen_down(std::int64_t begin, std::int64_t block, std::int64_t count) const {
    const float one = 1;
    for (std::int64_t i = block * kPanelRows; i < std::min(count, (block + 1) * kPanelRows); ++i) {
      const void *row = down(begin + i), *next = down(begin + std::min(i + 1, count - 1));
      std::memset(w_CW + i * width, 0, static_cast<std::size_t>(width) * sizeof(float));
      axpy()(w_CW + i * width, &row, &one, 1, args.hidden, &next);
    }
  }

  // Adds the contributions of the neurons [begin, begin + count). `widened`: whether their down rows are floats
  // already; set by this.
  void add_chunk(std::int64_t begin, std::int64_t count, bool* widened) const {
    const std::int64_t pairs = (count + kPair - 1) / kPair, end = begin + count;
    const auto counted = [&](std::int64_t items, const auto& work) {
      shop.each(items, [&](std::int64_t worker, std::int64_t i) {
        Counters done;
        work(worker, i, &done);
        pi2::count(done);
      });
    };
    counted(pairs,
            [&](std::int64_t worker, std::int64_t block, Counters* done) { gates(worker, begin, end, block, done); });
    Split split;
    float* y_T[kTokenTile];
    const float* h_T[kTokenTile];
    for (std::int64_t t = 0; t < tokens; ++t) {
      if (kDenseOneIn * fired(t, count) < count) {
        split.few.set(t);
        split.few_T[split.n_few++] = t;
      } else {
        split.many_x_T[split.n_many] = x_T[t];
        h_T[split.n_many] = h(t);
        y_T[split.n_many] = y(t);
        split.many_T[split.n_many++] = t;
      }
    }
    if (args.rows == 3 && split.n_many > 0)
      counted(pairs, [&](std::int64_t worker, std::int64_t block, Counters* done) {
        ups_of_many(worker, begin, end, block, split, done);
      });
    if (args.rows == 3 && split.n_few > 0)
      counted(pairs * ((tokens + 63) / 64), [&](std::int64_t, std::int64_t i, Counters* done) {
        ups_of_few(begin, end, i % pairs, i / pairs, split, done);
      });
    if (args.shaping.norms()) shop.each(tokens, [&](std::int64_t, std::int64_t t) { norm(t, begin, count); });
    if (split.n_few > 0)
      shop.each(split.n_few, [&](std::int64_t, std::int64_t i) { add_down(split.few_T[i], begin, count); });
    if (split.n_many == 0) return;
    const std::int64_t blocks = (count + kPanelRows - 1) / kPanelRows;
    if (!*widened) shop.each(blocks, [&](std::int64_t, std::int64_t block) { widen_down(begin, block, count); });
    *widened = true;
    Counters done;
    for (std::int64_t i = 0; i < split.n_many; ++i) done.down_rows += fired(split.many_T[i], count);
    pi2::count(done);
    shop.each((width + kDownColumns - 1) / kDownColumns, [&](std::int64_t, std::int64_t block) {
      const std::int64_t first = block * kDownColumns;
      table.addmm(h_T, w_CW, width, count, first, std::min(kDownColumns, width - first), y_T, split.n_many);
    });
  }

  void finish(std::int64_t worker, std::int64_t t, char* out) const {
    float* plain = shop.plain(worker);
    table.restore[static_cast<int>(args.dtype_of_down())](y(t), args.hidden, plain);
    const float scale = args.shaping.norms() ? norm_factor(args, squares_T[t]) : 1.0f;
    for (std::int64_t k = 0; args.shaping.norms() && k < args.hidden; ++k) plain[k] *= scale;
    if (args.bias_down != nullptr)
      for (std::int64_t k = 0; k < args.hidden; ++k) plain[k] += static_cast<const float*>(args.bias_down)[k];
    narrow(plain, out + t * row_bytes(args.x_dtype, args.hidden), args.x_dtype, args.hidden);
  }
};

// The chunks of a layer's neurons from args.first on.
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

// Requests all neurons from a source. `ids` has room for kChunkNeurons and a count for each chunk.
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

// Computes chunk by chunk, each for every tile of tokens: a chunk is read once, from memory or from flash.
void ffn_prompt(const FfnArgs& args, const KernelTable& table, const ParallelFor& parallel) {
  const std::int64_t most = std::min(kPromptTokens, args.tokens), tile = std::min(kTokenTile, args.tokens);
  const std::int64_t width = padded(args.hidden), x_bytes = row_bytes(args.x_dtype, args.hidden);
  const Chunks chunks(args);
  Workshop shop(parallel, args.hidden, most, tile);
  static_assert(sizeof(TileBits) % sizeof(float) == 0);
  constexpr std::int64_t kBitsFloats = kChunkNeurons * sizeof(TileBits) / sizeof(float);
  float* h_TC = scratch(Scratch::kPartials, tile * kChunkNeurons + (2 * most + kChunkNeurons) * width + kBitsFloats);
  float* a8_TW = h_TC + tile * kChunkNeurons;
  float* y_TW = a8_TW + most * width;
  float* w_CW = y_TW + most * width;
  auto* fired_C = reinterpret_cast<TileBits*>(w_CW + kChunkNeurons * width);
  const bool gated = args.rows == 3;
  std::int64_t* ids = nullptr;
  if (args.source != nullptr)
    ids = reinterpret_cast<std::int64_t*>(scratch(Scratch::kIds, 2 * chunks.count * (kChunkNeurons + 1)));
  FiringCall call(args);
  double squares_T[kPromptTokens];
  for (std::int64_t start = 0; start < args.tokens; start += most) {
    const std::int64_t tokens = std::min(most, args.tokens - start);
    std::fill_n(squares_T, tokens, 0.0);
    const FiringCounters* firing = call.next(tokens);
    const auto pass = [&](std::int64_t first) {
      return PromptPass{args,
                        table,
                        shop,
                        shop.x_T() + first,
                        a8_TW + first * width,
                        std::min(tile, tokens - first),
                        width,
                        h_TC,
                        fired_C,
                        y_TW + first * width,
                        w_CW,
                        args.source == nullptr ? nullptr : args.source->neuron_rows(),
                        firing,
                        squares_T + first};
    };
    shop.prepare(static_cast<const char*>(args.x) + start * x_bytes, args.x_dtype, tokens,
                 table.prepare_gemm[static_cast<int>(args.w_dtype)]);
    if (gated)
      shop.prepare_all(static_cast<const char*>(args.x) + start * x_bytes, args.x_dtype, tokens,
                       table.prepare_a8[static_cast<int>(args.w_dtype)], reinterpret_cast<char*>(a8_TW),
                       width * static_cast<std::int64_t>(sizeof(float)));
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
    const PromptPass all{args, table,   shop, shop.x_T(), a8_TW,   tokens,  width,
                         h_TC, fired_C, y_TW, w_CW,       nullptr, nullptr, squares_T};
    shop.each(tokens, [&](std::int64_t worker, std::int64_t t) {
      all.finish(worker, t, static_cast<char*>(args.y) + start * x_bytes);
    });
  }
}

}  // namespace pi2
