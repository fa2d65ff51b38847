// The sparse feed-forward layer: chunks of neurons in any order on any thread, partial sums added in chunk order.
//
// Within a chunk neurons go in small blocks through three steps, so that the latency of one neuron's horizontal sum and
// activation hides behind the reads of others, and what a block read is still in L2 when it is used again:
//   dot         gate and up rows of neurons that are hot or predicted; gate rows only under the exact gate
//   up          the up rows of those whose gate fired (exact gate only)
//   down        rows weighted by h, added to the partial sum four at a time
// Reads are prefetched one neuron's bundle ahead: gathered bundles defeat the hardware prefetcher at every start.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>

#include "core/activation.h"
#include "core/convert.h"
#include "core/counters.h"
#include "core/scratch.h"
#include "pi2/ffn.h"
#include "pi2/kernels.h"

namespace pi2 {
namespace {

constexpr std::int64_t kTokenTile = 64;  // tokens per pass over the weights: bounds the scratch of partial sums
constexpr std::int64_t kTinyMacs = 1 << 20;
constexpr std::int64_t kScan = 1024;  // neurons whose masks are combined at a time
constexpr std::int64_t kBlock = 16;   // neurons per block

// The tokens of a pass that a neuron is computed for: sparsity is per token, not per batch.
struct Tokens {
  std::int64_t n = 0;
  std::int64_t id[kTokenTile];
  const float* x[kTokenTile];

  void add(std::int64_t token, const float* x_TH, std::int64_t hidden) {
    id[n] = token;
    x[n++] = x_TH + token * hidden;
  }
};

// One pass: at most kTokenTile tokens, inputs already float.
struct Pass {
  const FfnArgs& args;
  const KernelTable& table;
  const float* x_TH;
  const std::uint8_t* active;  // of the first token of the pass, or null
  std::int64_t tokens;
  float* partials;     // [chunks, tokens, hidden]
  std::uint8_t* used;  // [chunks]
  float* y_TH;
  std::int64_t* ids;  // [neurons]; a chunk lists its neurons in its own part
  std::int64_t chunk_size, chunks;

  std::int64_t row_bytes() const { return args.hidden * dtype_bytes(args.w_dtype); }

  const char* bundle(std::int64_t neuron) const {
    return static_cast<const char*>(args.bundles) + neuron * args.rows * row_bytes();
  }

  // The tokens that want this neuron: all of them if it is hot or nothing was predicted.
  void asking(std::int64_t neuron, Tokens* tokens_out) const {
    tokens_out->n = 0;
    const std::int64_t cold = args.neurons - args.n_hot;
    const bool all = neuron < args.n_hot || active == nullptr;
    for (std::int64_t t = 0; t < tokens; ++t)
      if (all || active[t * cold + neuron - args.n_hot]) tokens_out->add(t, x_TH, args.hidden);
  }

  float bias(const void* values, std::int64_t neuron) const {
    return values == nullptr ? 0.0f : load_float(values, args.w_dtype, neuron);
  }

  // Row `first` of the neuron (0 gate, or up of a plain layer; 1 up) and the count - 1 rows after it, for `who`; the
  // hint as in kernels.h.
  void dot(std::int64_t neuron, std::int64_t first, std::int64_t count, const Tokens& who, float* out_RT,
           const char* next, std::int64_t next_bytes) const {
    const char* row = bundle(neuron) + first * row_bytes();
    const void* rows[kDotRows] = {row, row + row_bytes()};
    table.dot[static_cast<int>(args.w_dtype)](rows, count, who.x, who.n, args.hidden, out_RT, next, next_bytes);
  }

  void axpy(float* y, const void* const* rows, const float* h, std::int64_t count) const {
    table.axpy[static_cast<int>(args.w_dtype)](y, rows, h, count, args.hidden);
  }
};

// Ids of the chunk's neurons that some token wants, ascending; returns how many.
std::int64_t gather(const Pass& pass, std::int64_t begin, std::int64_t end, std::int64_t* ids) {
  std::int64_t n = 0;
  const std::int64_t n_hot = pass.args.n_hot, cold = pass.args.neurons - n_hot;
  for (std::int64_t i = begin; i < std::min(end, n_hot); ++i) ids[n++] = i;
  const std::int64_t first = std::max(begin, n_hot);
  if (pass.active == nullptr) {
    for (std::int64_t i = first; i < end; ++i) ids[n++] = i;
    return n;
  }
  if (pass.tokens == 1) {  // decode: skip eight unwanted neurons at a time
    const std::uint8_t* flags = pass.active - n_hot;
    std::int64_t i = first;
    for (; i + 8 <= end; i += 8) {
      std::uint64_t eight;
      std::memcpy(&eight, flags + i, 8);
      if (eight == 0) continue;
      for (std::int64_t k = i; k < i + 8; ++k)
        if (flags[k]) ids[n++] = k;
    }
    for (; i < end; ++i)
      if (flags[i]) ids[n++] = i;
    return n;
  }
  // Token by token over the whole range: neuron by neuron would jump through the mask.
  std::uint8_t any[kScan];
  for (std::int64_t start = first; start < end; start += kScan) {
    const std::int64_t width = std::min(kScan, end - start);
    std::memset(any, 0, static_cast<std::size_t>(width));
    for (std::int64_t t = 0; t < pass.tokens; ++t) {
      const std::uint8_t* flags = pass.active + t * cold + start - n_hot;
      for (std::int64_t i = 0; i < width; ++i) any[i] |= flags[i];
    }
    for (std::int64_t i = 0; i < width; ++i)
      if (any[i]) ids[n++] = start + i;
  }
  return n;
}

// What each token multiplies a neuron's down row with; 0 where it does not contribute.
using Values = float[kBlock][kTokenTile];

// act(gate + bias) where the neuron fires for a token of `who`, 0 elsewhere; `fired` receives the tokens it fires for.
// `gate` is in the order of `who`, h_T in that of the pass.
void gate_values(const Pass& pass, std::int64_t neuron, const Tokens& who, const float* gate, float* h_T, Tokens* fired,
                 Counters* done) {
  const FfnArgs& args = pass.args;
  const float bias = pass.bias(args.rows == 3 ? args.bias_gate : args.bias_up, neuron);
  // Hot neurons know no threshold, but an exact zero contributes nothing wherever it is.
  const float threshold = neuron < args.n_hot ? 0.0f : args.threshold;
  std::memset(h_T, 0, static_cast<std::size_t>(pass.tokens) * sizeof(float));
  fired->n = 0;
  done->gate_rows += who.n;
  for (std::int64_t i = 0; i < who.n; ++i) {
    const float value = activate(args.activation, gate[i] + bias);
    if (std::fabs(value) <= threshold) continue;  // written so that NaN fires
    h_T[who.id[i]] = value;
    fired->add(who.id[i], pass.x_TH, args.hidden);
  }
}

// h *= up, for the tokens of `who`, in whose order `up` is.
void multiply_up(const Pass& pass, std::int64_t neuron, const Tokens& who, const float* up, float* h_T,
                 Counters* done) {
  const FfnArgs& args = pass.args;
  const float bias = pass.bias(args.bias_up, neuron);
  for (std::int64_t i = 0; i < who.n; ++i) {
    float* h = h_T + who.id[i];
    if (*h == 0.0f) continue;  // read ahead with its gate, and not needed
    ++done->up_rows;
    *h *= args.activation_on_up ? activate(args.activation, up[i] + bias) : up[i] + bias;
  }
}

// Adds the block's contributions to y_TH, neurons in ascending order for every token.
void add_down(const Pass& pass, const std::int64_t* ids, std::int64_t n, const Values& h_NT, float* y_TH,
              Counters* done) {
  const FfnArgs& args = pass.args;
  for (std::int64_t t = 0; t < pass.tokens; ++t) {
    const void* rows[kAxpyRows];
    float h[kAxpyRows];
    std::int64_t filled = 0;
    for (std::int64_t j = 0; j < n; ++j) {
      if (h_NT[j][t] == 0.0f) continue;
      ++done->down_rows;
      rows[filled] = pass.bundle(ids[j]) + (args.rows - 1) * pass.row_bytes();
      h[filled] = h_NT[j][t];
      if (++filled == kAxpyRows) {
        pass.axpy(y_TH + t * args.hidden, rows, h, filled);
        filled = 0;
      }
    }
    if (filled > 0) pass.axpy(y_TH + t * args.hidden, rows, h, filled);
  }
}

// Neurons that are hot or predicted: most of what is read is used, so the next neuron's gate and up rows are
// fetched ahead; the down row behind them the hardware finds by itself (measured: asking for it too gains nothing).
void whole_bundles(const Pass& pass, const std::int64_t* ids, std::int64_t n, const std::int64_t* after, Values& h_NT,
                   Counters* done) {
  const std::int64_t first_rows = pass.args.rows - 1, fetched_bytes = first_rows * pass.row_bytes();
  float out_NRT[kBlock][kDotRows * kTokenTile];
  Tokens who_N[kBlock], fired;
  for (std::int64_t j = 0; j < n; ++j) {
    const std::int64_t* next = j + 1 < n ? &ids[j + 1] : after;
    pass.asking(ids[j], &who_N[j]);
    pass.dot(ids[j], 0, first_rows, who_N[j], out_NRT[j], next ? pass.bundle(*next) : nullptr,
             next ? fetched_bytes : 0);
  }
  for (std::int64_t j = 0; j < n; ++j) {
    const Tokens& who = who_N[j];
    gate_values(pass, ids[j], who, out_NRT[j], h_NT[j], &fired, done);
    if (first_rows == 2) multiply_up(pass, ids[j], who, out_NRT[j] + who.n, h_NT[j], done);
  }
}

// The exact gate: gate rows of all, the rest of a bundle only where the gate fired.
void gate_first(const Pass& pass, const std::int64_t* ids, std::int64_t n, const std::int64_t* after, Values& h_NT,
                Counters* done) {
  const std::int64_t row_bytes = pass.row_bytes(), rest_bytes = (pass.args.rows - 1) * row_bytes;
  float out_NT[kBlock][kTokenTile];
  Tokens everyone, fired_N[kBlock];
  pass.asking(ids[0], &everyone);
  for (std::int64_t j = 0; j < n; ++j) {
    const std::int64_t* next = j + 1 < n ? &ids[j + 1] : after;
    pass.dot(ids[j], 0, 1, everyone, out_NT[j], next ? pass.bundle(*next) : nullptr, next ? row_bytes : 0);
  }
  std::int64_t fired[kBlock], count = 0;
  for (std::int64_t j = 0; j < n; ++j) {
    gate_values(pass, ids[j], everyone, out_NT[j], h_NT[j], &fired_N[j], done);
    if (fired_N[j].n > 0) fired[count++] = j;
  }
  if (pass.args.rows == 2) return;
  for (std::int64_t f = 0; f < count; ++f) {
    const char* next = f + 1 < count ? pass.bundle(ids[fired[f + 1]]) + row_bytes : nullptr;
    pass.dot(ids[fired[f]], 1, 1, fired_N[fired[f]], out_NT[f], next, next ? rest_bytes : 0);
  }
  for (std::int64_t f = 0; f < count; ++f)
    multiply_up(pass, ids[fired[f]], fired_N[fired[f]], out_NT[f], h_NT[fired[f]], done);
}

void run_chunk(const Pass& pass, std::int64_t chunk) {
  const FfnArgs& args = pass.args;
  const std::int64_t begin = chunk * pass.chunk_size;
  const std::int64_t end = std::min(begin + pass.chunk_size, args.neurons);
  std::int64_t* ids = pass.ids + begin;
  const std::int64_t n = gather(pass, begin, end, ids);
  pass.used[chunk] = n > 0;
  if (n == 0) return;
  float* y_TH = pass.partials + chunk * pass.tokens * args.hidden;
  std::memset(y_TH, 0, static_cast<std::size_t>(pass.tokens * args.hidden) * sizeof(float));
  Counters done;
  for (std::int64_t start = 0; start < n; start += kBlock) {
    const std::int64_t block = std::min(kBlock, n - start);
    const std::int64_t* after = start + block < n ? &ids[start + block] : nullptr;
    Values h_NT;
    const bool predicted = pass.active != nullptr || ids[start + block - 1] < args.n_hot;
    (predicted ? whole_bundles : gate_first)(pass, ids + start, block, after, h_NT, &done);
    add_down(pass, ids + start, block, h_NT, y_TH, &done);
  }
  count(done);
}

// Hands out indices [0, n) one by one, so that dense chunks and nearly empty ones balance; the result does not depend
// on who took what.
struct Dynamic {
  std::atomic<std::int64_t> next{0};
  std::int64_t n;
  void (*body)(void* context, std::int64_t index);
  void* context;

  static void run(const ParallelFor& parallel, std::int64_t n, void (*body)(void*, std::int64_t), void* context) {
    Dynamic work;
    work.n = n;
    work.body = body;
    work.context = context;
    const std::int64_t workers = std::min<std::int64_t>(std::max(1, parallel.threads), n);
    parallel.run(
        parallel.host, workers,
        [](void* self, std::int64_t) {
          auto* w = static_cast<Dynamic*>(self);
          for (std::int64_t i = w->next.fetch_add(1); i < w->n; i = w->next.fetch_add(1)) w->body(w->context, i);
        },
        &work);
  }
};

constexpr std::int64_t kReduceColumns = 1024;

// y[:, block of columns] = sum of partial sums in chunk order + bias.
void reduce_columns(const Pass& pass, std::int64_t block) {
  const std::int64_t hidden = pass.args.hidden;
  const AxpyFn add = pass.table.axpy[static_cast<int>(DType::kF32)];
  const std::int64_t begin = block * kReduceColumns, width = std::min(kReduceColumns, hidden - begin);
  for (std::int64_t t = 0; t < pass.tokens; ++t) {
    float* y = pass.y_TH + t * hidden + begin;
    std::memset(y, 0, static_cast<std::size_t>(width) * sizeof(float));
    // y += 1 * part is exact, so the axpy kernel adds four partial sums per pass over y.
    const float ones[kAxpyRows] = {1, 1, 1, 1};
    const void* parts[kAxpyRows];
    std::int64_t filled = 0;
    for (std::int64_t c = 0; c < pass.chunks; ++c) {
      if (!pass.used[c]) continue;
      parts[filled] = pass.partials + (c * pass.tokens + t) * hidden + begin;
      if (++filled == kAxpyRows) {
        add(y, parts, ones, filled, width);
        filled = 0;
      }
    }
    if (filled > 0) add(y, parts, ones, filled, width);
    if (pass.args.bias_down != nullptr)
      for (std::int64_t k = 0; k < width; ++k) y[k] += load_float(pass.args.bias_down, pass.args.w_dtype, begin + k);
  }
}

// Chunks, then columns, in one parallel region: a second fork would cost as much as the reduction itself. A worker that
// runs out of chunks waits for those still in other workers' hands; it never waits for one that nobody has begun.
struct Work {
  const Pass& pass;
  std::int64_t column_blocks;
  std::atomic<std::int64_t> next_chunk{0}, done_chunks{0}, next_block{0};

  void run() {
    for (std::int64_t c = next_chunk.fetch_add(1); c < pass.chunks; c = next_chunk.fetch_add(1)) {
      run_chunk(pass, c);
      done_chunks.fetch_add(1, std::memory_order_release);
    }
    while (done_chunks.load(std::memory_order_acquire) < pass.chunks) std::this_thread::yield();
    for (std::int64_t b = next_block.fetch_add(1); b < column_blocks; b = next_block.fetch_add(1))
      reduce_columns(pass, b);
  }
};

}  // namespace

void sparse_ffn(const FfnArgs& args, const ParallelFor& parallel) {
  const std::int64_t chunk_size = chunk_neurons(args.neurons);
  const std::int64_t chunks = (args.neurons + chunk_size - 1) / chunk_size;
  const std::int64_t tile = std::min(kTokenTile, args.tokens);
  float* x_TH = scratch(Scratch::kInput, 2 * tile * args.hidden);
  float* y_TH = x_TH + tile * args.hidden;
  float* partials = scratch(Scratch::kPartials, chunks * tile * args.hidden + chunks);
  auto* used = reinterpret_cast<std::uint8_t*>(partials + chunks * tile * args.hidden);
  // All memory is taken here, on the calling thread: a worker that failed to get some would leave others waiting.
  static_assert(sizeof(std::int64_t) == 2 * sizeof(float));
  auto* ids = reinterpret_cast<std::int64_t*>(scratch(Scratch::kIds, 2 * args.neurons));
  const std::int64_t x_bytes = args.hidden * dtype_bytes(args.x_dtype);

  for (std::int64_t start = 0; start < args.tokens; start += tile) {
    const std::int64_t tokens = std::min(tile, args.tokens - start);
    widen(static_cast<const char*>(args.x) + start * x_bytes, args.x_dtype, x_TH, tokens * args.hidden);
    const std::uint8_t* active = args.active == nullptr ? nullptr : args.active + start * (args.neurons - args.n_hot);
    const Pass pass{args, kernels(), x_TH, active, tokens, partials, used, y_TH, ids, chunk_size, chunks};
    Work work{pass, (args.hidden + kReduceColumns - 1) / kReduceColumns};
    // Waking a thread costs a few microseconds: not for less arithmetic than that.
    const bool tiny = tokens * args.neurons * args.rows * args.hidden < kTinyMacs;
    const std::int64_t workers = tiny ? 1 : std::min<std::int64_t>(std::max(1, parallel.threads), chunks);
    parallel.run(parallel.host, workers, [](void* w, std::int64_t) { static_cast<Work*>(w)->run(); }, &work);
    narrow(y_TH, static_cast<char*>(args.y) + start * x_bytes, args.x_dtype, tokens * args.hidden);
  }
  const std::int64_t pairs = args.tokens * args.neurons;
  count({1, args.tokens, pairs, 0, 0, 0, pairs * args.rows});
}

void predict_lowrank(const LowrankArgs& args, const ParallelFor& parallel) {
  const KernelTable& table = kernels();
  const DotFn dot = table.dot[static_cast<int>(DType::kI8)];
  const std::int64_t tile = std::min(kTokenTile, args.tokens);
  float* x_TH = scratch(Scratch::kInput, tile * (args.hidden + args.rank));
  float* z_Tr = x_TH + tile * args.hidden;
  const std::int64_t x_bytes = args.hidden * dtype_bytes(args.x_dtype);

  struct Step {
    const LowrankArgs& args;
    DotFn dot;
    float* z_Tr;
    const float* const* x_T;
    const float* const* z_T;
    std::uint8_t* active;
    std::int64_t tokens;
  };
  const float* x_T[kTokenTile];
  const float* z_T[kTokenTile];
  for (std::int64_t t = 0; t < tile; ++t) {
    x_T[t] = x_TH + t * args.hidden;
    z_T[t] = z_Tr + t * args.rank;
  }
  constexpr std::int64_t kRows = 512;
  for (std::int64_t start = 0; start < args.tokens; start += tile) {
    const std::int64_t tokens = std::min(tile, args.tokens - start);
    widen(static_cast<const char*>(args.x) + start * x_bytes, args.x_dtype, x_TH, tokens * args.hidden);
    Step step{args, dot, z_Tr, x_T, z_T, args.active + start * args.cold, tokens};
    constexpr std::int64_t kRanks = 64;
    const std::int64_t rank_blocks = (args.rank + kRanks - 1) / kRanks;
    auto project = [](void* context, std::int64_t block) {
      const Step& s = *static_cast<Step*>(context);
      float out[kTokenTile];
      for (std::int64_t r = block * kRanks; r < std::min(s.args.rank, (block + 1) * kRanks); ++r) {
        const void* row = s.args.a + r * s.args.hidden;
        s.dot(&row, 1, s.x_T, s.tokens, s.args.hidden, out, nullptr, 0);
        for (std::int64_t t = 0; t < s.tokens; ++t)
          s.z_Tr[t * s.args.rank + r] = activate(Activation::kRelu, out[t] * s.args.a_scale[r]);
      }
    };
    Dynamic::run(args.rank * args.hidden > 65536 ? parallel : serial(), rank_blocks, project, &step);
    auto score = [](void* context, std::int64_t block) {
      const Step& s = *static_cast<Step*>(context);
      float out[kTokenTile];
      for (std::int64_t c = block * kRows; c < std::min(s.args.cold, (block + 1) * kRows); ++c) {
        const void* row = s.args.b + c * s.args.rank;
        s.dot(&row, 1, s.z_T, s.tokens, s.args.rank, out, nullptr, 0);
        const float bias = s.args.b_bias == nullptr ? 0.0f : s.args.b_bias[c];
        for (std::int64_t t = 0; t < s.tokens; ++t)
          s.active[t * s.args.cold + c] = !(out[t] * s.args.b_scale[c] + bias < s.args.threshold);
      }
    };
    const std::int64_t blocks = (args.cold + kRows - 1) / kRows;
    Dynamic::run(args.rank * args.cold > 65536 ? parallel : serial(), blocks, score, &step);
  }
}

std::uint64_t read_bundles(const void* bundles, std::int64_t bundle_bytes, std::int64_t count,
                           const std::int64_t* index, const ParallelFor& parallel) {
  struct Step {
    const char* base;
    std::int64_t bytes, count;
    const std::int64_t* index;
    ReadFn read;
    std::atomic<std::uint64_t> sum{0};
  };
  Step step{static_cast<const char*>(bundles), bundle_bytes, count, index, kernels().read, {}};
  constexpr std::int64_t kBundles = 16;
  auto some = [](void* context, std::int64_t block) {
    Step& s = *static_cast<Step*>(context);
    std::uint64_t sum = 0;
    const std::int64_t begin = block * kBundles, end = std::min(s.count, begin + kBundles);
    if (s.index == nullptr) {
      sum = s.read(s.base + begin * s.bytes, (end - begin) * s.bytes);
    } else {
      for (std::int64_t i = begin; i < end; ++i) sum += s.read(s.base + s.index[i] * s.bytes, s.bytes);
    }
    s.sum.fetch_add(sum, std::memory_order_relaxed);
  };
  Dynamic::run(parallel, (count + kBundles - 1) / kBundles, some, &step);
  return step.sum.load();
}

}  // namespace pi2
