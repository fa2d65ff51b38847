// The sparse feed-forward layer: chunks of neurons in any order on any thread, partial sums added in chunk order.
//
// Within a chunk, small blocks of neurons go through three steps. The latency of one neuron's horizontal sum and
// activation is hidden behind the reads of others, and the rows of a block are still in L2 when they are used again:
//   dot         gate and up rows of hot or predicted neurons; only gate rows with the exact gate
//   up          up rows of the neurons whose gate fired (exact gate only)
//   down        rows weighted by h, added to the partial sum four at a time
// Layers without gates take up rows 16 neurons at a time where takes_up_blocks() says so, and then down.
// If firing depends on the gates of all neurons (Shaping::sigmas), these are computed first.
// Rows are prefetched some neurons ahead: gathered rows defeat the hardware prefetcher at every start.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "base/convert.h"
#include "base/parallel.h"
#include "base/scratch.h"
#include "base/timings.h"
#include "base/trace.h"
#include "ffn/activation.h"
#include "ffn/chunk_sums.h"
#include "ffn/counters.h"
#include "ffn/down_queue.h"
#include "ffn/firing.h"
#include "ffn/panels.h"
#include "kernels/fetch_rows.h"
#include "pi2/ffn.h"
#include "pi2/kernels.h"
#include "pi2/linear.h"
#include "pi2/predict.h"

namespace pi2 {
namespace {

constexpr std::int64_t kTinyMacs = 1 << 20;
constexpr std::int64_t kLastTokens = 8;   // last tokens of a stream: the tokens after it need similar neurons
constexpr std::int64_t kScan = 1024;      // neurons whose masks are combined at a time
constexpr std::int64_t kBlock = 16;       // neurons per block
constexpr std::int64_t kLanesTokens = 2;  // for more, making blocks of up rows pays
// Neurons whose down rows are added together: a token's sum is then loaded once for several of them.
constexpr std::int64_t kTogether = 256, kFewTogether = 64, kFewTokens = 12;
static_assert(kTogether <= 256, "their numbers are bytes");
constexpr std::int64_t kBlockOfOne = 4;      // neurons per block for one token: rows are used soon after they are read
constexpr std::int64_t kAheadBytes = 12288;  // how far ahead reads are asked for: memory answers after 200 ns and more

// The tokens of a pass that a neuron is computed for: sparsity is per token, not per batch.
struct Tokens {
  std::int64_t n = 0;
  std::int64_t id[kPassTokens];
  const void* x[kPassTokens];

  void add(std::int64_t token, const float* x_TW, std::int64_t width) {
    id[n] = token;
    x[n++] = x_TW + token * width;
  }
};

// One pass: at most kPassTokens tokens with prepared inputs.
struct Pass {
  const FfnArgs& args;
  const KernelTable& table;
  std::int64_t width;          // floats of an input or partial sum: hidden, or padded(hidden) for quantised weights
  const float* x_TW;           // prepared
  const std::uint8_t* active;  // mask of the first token of the pass, or null
  std::int64_t tokens;
  float* partials;     // [chunks, tokens, width], in axpy order
  std::uint8_t* used;  // [chunks]
  float* y_TW;
  std::int64_t* ids;      // [neurons]; each chunk lists its neurons in its own part
  std::uint64_t* wanted;  // for each id, one bit per token that needs it; null: one token, or more than 64
  std::int64_t base, chunk_size, chunks;
  std::int64_t* counts = nullptr;      // [chunks] numbers of ids; with a source, listed before any chunk is computed
  const char* const* where = nullptr;  // neuron_rows() of a source
  const FiringCounters* firing = nullptr;  // null: not watched
  std::uint64_t* fired = nullptr;          // [chunk_size]: bits are stored here instead of added to `firing`
  const float* gates_NT = nullptr;         // layers with a cut: the gates of all neurons, without biases
  const float* cut_T = nullptr;            // layers with a cut: the cut of each token
  double* squares_CT = nullptr;            // layers with a norm: [chunks, tokens]
  bool up_blocks = false;                  // takes_up_blocks()

  // Prefetch distance in neurons, if `together` are computed at a time and `bytes` of each are prefetched.
  static std::int64_t ahead(std::int64_t bytes, std::int64_t together) {
    return std::max(together, kAheadBytes / bytes / together * together);
  }

  const char* row_of(std::int64_t neuron, std::int64_t r) const {
    return where != nullptr ? args.row_at(where[neuron], neuron, r) : args.row_of(neuron, r);
  }

  // The tokens that need neuron ids[i].
  void asking(std::int64_t i, Tokens* tokens_out) const {
    tokens_out->n = 0;
    for (std::uint64_t left = wanted == nullptr ? 1 : wanted[i]; left != 0; left &= left - 1)
      tokens_out->add(__builtin_ctzll(left), x_TW, width);
  }

  float bias(const void* values, std::int64_t neuron) const {
    return values == nullptr ? 0.0f : load_float(values, args.bias_dtype(), neuron);
  }

  // Dot products of the rows [first, first + count) (0 gate, or up of a plain layer; 1 up) of the neurons ids[0, some),
  // at most kDotRows / count, for the tokens `who`. `next`: null, or as many neurons whose rows are prefetched.
  void dot(const std::int64_t* ids_N, std::int64_t some, std::int64_t first, std::int64_t count, const Tokens& who,
           float* out_NRT, const std::int64_t* next_N) const {
    const void *rows[kDotRows], *next[kDotRows];
    for (std::int64_t k = 0; k < some; ++k) {
      if (firing != nullptr && first == 0) firing->expect(ids_N[k]);
      for (std::int64_t r = 0; r < count; ++r) {
        rows[k * count + r] = row_of(ids_N[k], first + r);
        next[k * count + r] = next_N == nullptr ? nullptr : row_of(next_N[k], first + r);
      }
    }
    const DotFn* dots = args.int8_activations ? table.dot_a8 : table.dot;
    dots[static_cast<int>(args.w_dtype)](rows, some * count, who.x, who.n, args.hidden, out_NRT,
                                         next_N == nullptr ? nullptr : next);
  }

  AxpyFn axpy() const { return table.axpy[static_cast<int>(args.dtype_of_down())]; }

  // The bit of a token for which a neuron's score (see pi2/firing.h) is `score`; 0 if it does not fire.
  std::uint64_t bit(std::int64_t token, float score) const {
    return static_cast<std::uint64_t>(!(std::fabs(score) <= firing->cut)) << token;
  }

  // Counts the neuron for the tokens whose bits are set.
  void fires(std::int64_t neuron, std::uint64_t bits) const {
    if (bits == 0) return;
    if (fired != nullptr)
      fired[(neuron - base) % chunk_size] = bits;
    else
      firing->add(neuron, bits);
  }

  // Whether |h|, and not |act(gate)|, is compared with the cut.
  bool scores_h() const { return args.rows == 3 && args.activation_on_up; }
};

// The chunks of a layer.
struct Chunks {
  std::int64_t base, size, count;

  explicit Chunks(const FfnArgs& args) : base(chunk_base(args.first)), size(args.chunk_size()), count(args.chunks()) {}
};

// For the neurons [begin, begin + width): one bit for each of at most 8 tokens that need it.
void eight_tokens(const std::uint8_t* flags, std::int64_t cold, std::int64_t tokens, std::int64_t width,
                  std::uint8_t* bits) {
  std::memset(bits, 0, static_cast<std::size_t>(width));
  for (std::int64_t t = 0; t < tokens; ++t, flags += cold)
    for (std::int64_t i = 0; i < width; ++i) bits[i] |= static_cast<std::uint8_t>((flags[i] != 0 ? 1 : 0) << (t % 8));
}

// As gather, for layers with a cut: the neurons whose gates are above it.
std::int64_t gather_cut(const Pass& pass, std::int64_t chunk) {
  const FfnArgs& args = pass.args;
  const std::int64_t begin = pass.base + chunk * pass.chunk_size;
  const std::int64_t end = std::min(begin + pass.chunk_size, args.neurons);
  std::int64_t n = chunk * pass.chunk_size;
  for (std::int64_t i = begin; i < end; ++i) {
    const float bias = pass.bias(args.rows == 3 ? args.bias_gate : args.bias_up, i);
    const bool masked = pass.active != nullptr && i >= args.n_hot;
    std::uint64_t bits = 0;
    for (std::int64_t t = 0; t < pass.tokens; ++t) {
      if (masked && pass.active[t * (args.neurons - args.n_hot) + i - args.n_hot] == 0) continue;
      const bool fires = !(pass.gates_NT[i * pass.tokens + t] + bias <= pass.cut_T[t]);  // so that NaN fires
      bits |= static_cast<std::uint64_t>(fires) << t;
    }
    if (bits == 0) continue;
    if (pass.wanted != nullptr) pass.wanted[n] = bits;
    pass.ids[n++] = i;
  }
  return n - chunk * pass.chunk_size;
}

// Writes the ids of the chunk's neurons that some token needs, ascending, to its part of `ids`; returns their number.
std::int64_t gather(const Pass& pass, std::int64_t chunk) {
  if (pass.cut_T != nullptr) return gather_cut(pass, chunk);
  std::int64_t n = 0;
  const std::int64_t n_hot = pass.args.n_hot, cold = pass.args.neurons - n_hot;
  const std::int64_t start_of_chunk = pass.base + chunk * pass.chunk_size;
  const std::int64_t begin = std::max(start_of_chunk, pass.args.first);
  const std::int64_t end = std::min(start_of_chunk + pass.chunk_size, pass.args.neurons);
  std::int64_t* ids = pass.ids + chunk * pass.chunk_size;
  std::uint64_t* wanted = pass.wanted == nullptr ? nullptr : pass.wanted + chunk * pass.chunk_size;
  const std::int64_t by_all = pass.active == nullptr ? end : std::min(end, n_hot);
  for (std::int64_t i = begin; i < by_all; ++i) ids[n++] = i;
  if (wanted != nullptr) std::fill_n(wanted, n, ~std::uint64_t{0} >> (64 - pass.tokens));
  if (pass.active == nullptr) return n;
  const std::int64_t first = std::max(begin, by_all);
  if (pass.tokens == 1) {
    const std::uint8_t* flags = pass.active - n_hot;
    for (std::int64_t i = first; i < end; ++i) {  // without a branch: which neurons are needed is unpredictable
      ids[n] = i;
      n += flags[i] != 0;
    }
    return n;
  }
  // Token by token over a range of neurons: neuron by neuron would stride through the mask.
  for (std::int64_t start = first; start < end; start += kScan) {
    const std::int64_t width = std::min(kScan, end - start);
    std::uint64_t by_neuron[kScan] = {};
    for (std::int64_t t = 0; t < pass.tokens; t += 8) {
      std::uint8_t bits[kScan];
      const std::int64_t some = std::min<std::int64_t>(8, pass.tokens - t);
      eight_tokens(pass.active + t * cold + start - n_hot, cold, some, width, bits);
      for (std::int64_t i = 0; i < width; ++i) by_neuron[i] |= std::uint64_t{bits[i]} << t % 64;
    }
    for (std::int64_t i = 0; i < width; ++i) {
      if (by_neuron[i] == 0) continue;
      if (wanted != nullptr) wanted[n] = by_neuron[i];
      ids[n++] = start + i;
    }
  }
  return n;
}

// The contributions of a block's neurons: for each token the numbers of the neurons within the block, ascending, and
// the factors of their down rows.
struct Contributions {
  std::int32_t count_T[kPassTokens] = {};
  double squares_T[kPassTokens] = {};  // layers with a norm: of all h so far
  std::uint8_t row_TN[kPassTokens][kTogether];
  float h_TN[kPassTokens][kTogether];

  void add(std::int64_t token, std::int64_t row, float h) {
    const std::int32_t i = count_T[token]++;
    row_TN[token][i] = static_cast<std::uint8_t>(row);
    h_TN[token][i] = h;
  }
};

// Replaces `gate`, in the order of `who`, by act(gate + bias) of the neuron, and by 0 where it does not fire. `fired`,
// if given, receives the tokens for which it fires.
void fire(const Pass& pass, std::int64_t neuron, const Tokens& who, float* gate, Tokens* fired, Counters* done) {
  const FfnArgs& args = pass.args;
  const float bias = pass.bias(args.rows == 3 ? args.bias_gate : args.bias_up, neuron);
  const float threshold = args.threshold_of(neuron);  // an exact zero contributes nothing in any case
  if (pass.cut_T == nullptr) done->gate_rows += who.n;
  const bool counted = pass.firing != nullptr && !pass.scores_h();
  std::uint64_t bits = 0;
  if (fired != nullptr) fired->n = 0;
  for (std::int64_t i = 0; i < who.n; ++i) {
    const float v = gate[i] + bias;
    const float value = activate(args, pass.cut_T == nullptr ? v : v - pass.cut_T[who.id[i]]);
    gate[i] = std::fabs(value) <= threshold ? 0.0f : value;  // written so that NaN fires
    if (gate[i] == 0.0f) continue;
    if (fired != nullptr) fired->add(who.id[i], pass.x_TW, pass.width);
    if (counted) bits |= pass.bit(who.id[i], value);
  }
  if (counted) pass.fires(neuron, bits);
}

// Adds the contributions of neuron `row` of the block. `gate` (0: it does not fire) and `up` (null: none) are in the
// order of `who`.
void contribute(const Pass& pass, std::int64_t neuron, std::int64_t row, const Tokens& who, const float* gate,
                const float* up, Contributions* out, Counters* done) {
  const FfnArgs& args = pass.args;
  const bool norms = args.shaping.norms();
  const float bias = up == nullptr || norms ? 0.0f : pass.bias(args.bias_up, neuron);
  const float weight = !norms || args.bias_up == nullptr ? 1.0f : pass.bias(args.bias_up, neuron);
  const bool counted = up != nullptr && pass.firing != nullptr && pass.scores_h();
  std::uint64_t bits = 0;
  for (std::int64_t i = 0; i < who.n; ++i) {
    float h = gate[i];
    if (h == 0.0f) continue;
    if (up != nullptr) {
      ++done->up_rows;
      h *= factor(args, up[i] + bias);
      if (counted) bits |= pass.bit(who.id[i], h);
      if (h == 0.0f) continue;
    }
    ++done->down_rows;
    if (norms) h = normed(h, weight, &out->squares_T[who.id[i]]);
    out->add(who.id[i], row, h);
  }
  if (counted) pass.fires(neuron, bits);
}

// Adds the contributions to y_TW, for every token in ascending order of neurons.
void add_down(const Pass& pass, const std::int64_t* ids, const Contributions& some, float* y_TW, DownQueue* queue_T) {
  const FfnArgs& args = pass.args;
  for (std::int64_t t = 0; t < pass.tokens; ++t)
    for (std::int32_t i = 0; i < some.count_T[t]; ++i)
      queue_T[t].add(pass.axpy(), args.hidden, pass.row_of(ids[some.row_TN[t][i]], args.rows - 1), some.h_TN[t][i],
                     y_TW + t * pass.width);
}

// Hot or predicted neurons: most rows are used, so gate and up rows are prefetched together.
void whole_neurons(const Pass& pass, std::int64_t first, std::int64_t n, std::int64_t following, std::int64_t row,
                   Contributions* out, Counters* done) {
  const std::int64_t* ids = pass.ids + first;
  const std::int64_t first_rows = pass.args.rows - 1, out_width = first_rows * pass.tokens;
  // A single token can take several neurons in one call.
  const std::int64_t together = pass.tokens == 1 ? kDotRows / first_rows : 1;
  const std::int64_t ahead = pass.ahead(pass.args.down_offset(), together);
  float out_NRT[kBlock * 2 * kPassTokens];
  Tokens who_N[kBlock];
  for (std::int64_t j = 0; j < n; j += together) {
    const std::int64_t some = std::min(together, n - j);
    const bool more = j + ahead + some <= n + following;
    for (std::int64_t k = j; k < j + some; ++k) pass.asking(first + k, &who_N[k]);
    pass.dot(ids + j, some, 0, first_rows, who_N[j], out_NRT + j * out_width, more ? ids + j + ahead : nullptr);
  }
  for (std::int64_t j = 0; j < n; ++j) {
    const Tokens& who = who_N[j];
    float* gate = out_NRT + j * out_width;
    fire(pass, ids[j], who, gate, nullptr, done);
    contribute(pass, ids[j], row + j, who, gate, first_rows == 2 ? gate + who.n : nullptr, out, done);
  }
}

// The exact gate: gate rows of all neurons, up and down rows only where the gate fired.
void gate_first(const Pass& pass, std::int64_t first, std::int64_t n, std::int64_t following, std::int64_t row,
                Contributions* out, Counters* done) {
  const std::int64_t* ids = pass.ids + first;
  const std::int64_t ahead = pass.ahead(pass.args.row_bytes(), kDotRows);
  float gate_NT[kBlock * kPassTokens], up_T[kPassTokens];
  Tokens everyone, fired_N[kBlock];
  pass.asking(first, &everyone);
  for (std::int64_t j = 0; pass.cut_T == nullptr && j < n; j += kDotRows) {
    const std::int64_t some = std::min(kDotRows, n - j);
    const bool more = j + ahead + some <= n + following;
    pass.dot(ids + j, some, 0, 1, everyone, gate_NT + j * pass.tokens, more ? ids + j + ahead : nullptr);
  }
  std::int64_t firing[kBlock], count = 0;
  for (std::int64_t j = 0; j < n; ++j) {
    if (pass.cut_T != nullptr) {
      pass.asking(first + j, &everyone);
      for (std::int64_t i = 0; i < everyone.n; ++i)
        gate_NT[j * pass.tokens + i] = pass.gates_NT[ids[j] * pass.tokens + everyone.id[i]];
    }
    fire(pass, ids[j], everyone, gate_NT + j * pass.tokens, &fired_N[j], done);
    if (fired_N[j].n > 0) firing[count++] = j;
  }
  for (std::int64_t f = 0; f < count; ++f) {
    const std::int64_t j = firing[f];
    const Tokens& who = fired_N[j];
    float* gate_T = gate_NT + j * pass.tokens;
    for (std::int64_t i = 0, k = 0; k < who.n; ++i)
      if (gate_T[i] != 0.0f) gate_T[k++] = gate_T[i];
    if (pass.args.rows == 3) {
      pass.dot(ids + j, 1, 1, 1, who, up_T, f + 1 < count ? ids + firing[f + 1] : nullptr);
    }
    contribute(pass, ids[j], row + j, who, gate_T, pass.args.rows == 3 ? up_T : nullptr, out, done);
  }
}

// Bytes of the blocks that products() makes at a time, and their place for the chunk or tile `i`.
std::int64_t made_bytes(const FfnArgs& args) { return kGemmPanels * kPanelRows * args.row_bytes(); }
char* made_of(const FfnArgs& args, char* all, std::int64_t i) {
  return all == nullptr ? nullptr : all + i * made_bytes(args);
}

// out_TN [tokens, kTogether] = x times the up rows of the neurons ids[0, n); rows up to ids[last) are prefetched.
// `made`: made_bytes(), for blocks that are not in memory. Blocks that are there are of neighbours.
void products(const Pass& pass, const std::int64_t* ids, std::int64_t n, std::int64_t last, char* made, float* out_TN) {
  const FfnArgs& args = pass.args;
  const DotBlocksFn dot = pass.table.dot_blocks[static_cast<int>(args.w_dtype)];
  // Many tokens are bound by arithmetic: two blocks share the inputs. One is bound by memory: one block is one stream.
  const std::int64_t most = pass.tokens == 1 ? kPanelRows : kGemmPanels * kPanelRows;
  const DotLanesFn lanes = pass.table.dot_lanes[static_cast<int>(args.w_dtype)];
  const bool few = lanes != nullptr && pass.tokens <= kLanesTokens;
  const void* x_T[kPassTokens];
  for (std::int64_t t = 0; t < pass.tokens; ++t) x_T[t] = pass.x_TW + t * pass.width;
  for (std::int64_t i = 0; i < n; i += most) {
    const std::int64_t count = (std::min(most, n - i) + kPanelRows - 1) / kPanelRows;
    if (args.up_blocks) {
      dot(args.row_of(ids[i], 0), count, x_T, pass.tokens, args.hidden, out_TN + i, kTogether);
      continue;
    }
    for (std::int64_t b = 0; b < count; ++b) {
      const void *rows[kPanelRows], *next[kPanelRows];
      for (std::int64_t r = 0; r < kPanelRows; ++r) {
        const std::int64_t at = i + b * kPanelRows + r;
        rows[r] = pass.row_of(ids[std::min(at, last - 1)], 0);
        next[r] = pass.row_of(ids[std::min(at + kPanelRows, last - 1)], 0);
      }
      if (few)
        lanes(rows, next, x_T, pass.tokens, args.hidden, out_TN + i + b * kPanelRows, kTogether);
      else
        to_block(rows, args.w_dtype, args.hidden, next, made + b * kPanelRows * args.row_bytes());
    }
    if (!few) dot(made, count, x_T, pass.tokens, args.hidden, out_TN + i, kTogether);
  }
}

// Up rows of the neurons ids[0, n), at most kTogether of a layer without gates: adds the contributions of those that
// fire, without a branch for those that do not. A mask of all that fire for some token changes nothing.
void ups(const Pass& pass, const std::int64_t* ids, std::int64_t n, std::int64_t last, char* made, Contributions* out,
         Counters* done) {
  const FfnArgs& args = pass.args;
  float h_TN[kPassTokens * kTogether], bias_N[kTogether], threshold_N[kTogether];
  products(pass, ids, n, last, made, h_TN);
  for (std::int64_t i = 0; i < n; ++i) {
    bias_N[i] = pass.bias(args.bias_up, ids[i]);
    threshold_N[i] = args.threshold_of(ids[i]);
  }
  const bool plain = args.shaping.plain && !args.shaping.second;
  for (std::int64_t t = 0; t < pass.tokens; ++t) {
    float* h_N = h_TN + t * kTogether;
    for (std::int64_t i = 0; i < n; ++i) h_N[i] += bias_N[i];
    if (plain && args.activation == Activation::kRelu)  // the common cases, which the compiler vectorises
      for (std::int64_t i = 0; i < n; ++i) h_N[i] = activate(Activation::kRelu, h_N[i]);
    else if (plain && args.activation == Activation::kRelu2)
      for (std::int64_t i = 0; i < n; ++i) h_N[i] = activate(Activation::kRelu2, h_N[i]);
    else
      for (std::int64_t i = 0; i < n; ++i) h_N[i] = activate(args, h_N[i]);
    std::int32_t count = 0;
    for (std::int64_t i = 0; i < n; ++i) {  // NaN fires
      out->row_TN[t][count] = static_cast<std::uint8_t>(i);
      out->h_TN[t][count] = h_N[i];
      count += !(std::fabs(h_N[i]) <= threshold_N[i]);
    }
    out->count_T[t] = count;
    done->down_rows += count;
  }
  done->gate_rows += n * pass.tokens;
  for (std::int64_t i = 0; pass.firing != nullptr && i < n; ++i) {
    std::uint64_t bits = 0;
    for (std::int64_t t = 0; t < pass.tokens; ++t) {
      const float h = h_TN[t * kTogether + i];
      if (!(std::fabs(h) <= threshold_N[i])) bits |= pass.bit(t, h);
    }
    pass.fires(ids[i], bits);
  }
}

// Writes the chunk's partial sum [tokens, width] to y_TW and, with a norm, its sums of squares to squares_T. False: no
// neuron is needed, and nothing was written. `made`: see products().
bool run_chunk(const Pass& pass, std::int64_t chunk, float* y_TW, double* squares_T, char* made) {
  const TraceSpan span(Stage::kCompute, pass.args.layer, chunk);
  const FfnArgs& args = pass.args;
  const std::int64_t first = chunk * pass.chunk_size;
  const std::int64_t n = pass.counts != nullptr ? pass.counts[chunk] : gather(pass, chunk);
  if (n == 0) return false;
  if (!pass.up_blocks && pass.cut_T == nullptr) {  // the first neurons; their successors are prefetched with them
    const std::int64_t bytes = pass.active == nullptr ? args.row_bytes() : args.down_offset();
    for (std::int64_t i = first; i < first + std::min(n, pass.ahead(bytes, kDotRows)); ++i)
      for (std::int64_t at = 0; at < bytes; at += 64) fetch(pass.row_of(pass.ids[i], 0) + at);
  }
  std::memset(y_TW, 0, static_cast<std::size_t>(pass.tokens * pass.width) * sizeof(float));
  Counters done;
  DownQueue queue_T[kPassTokens];
  const std::int64_t block = pass.tokens == 1 ? kBlockOfOne : kBlock;
  const std::int64_t least = pass.up_blocks ? kFewTogether : kBlockOfOne;
  const std::int64_t together = pass.tokens == 1 ? least : pass.tokens < kFewTokens ? kFewTogether : kTogether;
  Contributions some;
  for (std::int64_t start = 0; start < n; start += together) {
    const std::int64_t end = std::min(n, start + together);
    if (pass.up_blocks) {
      ups(pass, pass.ids + first + start, end - start, n - start, made, &some, &done);
      add_down(pass, pass.ids + first + start, some, y_TW, queue_T);
      continue;
    }
    std::fill_n(some.count_T, pass.tokens, 0);
    for (std::int64_t i = start; i < end; i += block) {
      const std::int64_t count = std::min(block, end - i);
      const bool hot = pass.ids[first + i + count - 1] < args.n_hot;
      const bool predicted = pass.cut_T == nullptr && (pass.active != nullptr || hot);
      (predicted ? whole_neurons : gate_first)(pass, first + i, count, n - i - count, i - start, &some, &done);
    }
    add_down(pass, pass.ids + first + start, some, y_TW, queue_T);
  }
  for (std::int64_t t = 0; t < pass.tokens; ++t) queue_T[t].flush(pass.axpy(), args.hidden, y_TW + t * pass.width);
  if (args.shaping.norms()) std::copy_n(some.squares_T, pass.tokens, squares_T);
  count(done);
  return true;
}

// Chunks, then columns, in one parallel region: a second fork would cost as much as the reduction itself. A worker that
// runs out of chunks only waits for chunks that other workers are computing.
struct Work {
  const Pass& pass;
  const ChunkSums sums;
  const std::int64_t column_blocks;
  char* made;  // [chunks], see products()
  std::atomic<std::int64_t> next_chunk{0}, done_chunks{0}, next_block{0};
  std::atomic<bool> begun{false};

  void run() {
    if (pass.args.source != nullptr) {
      // Looking up and requesting thousands of neurons takes time; meanwhile the others compute what is in memory.
      if (!begun.exchange(true)) pass.args.source->begin(pass.ids, pass.counts, pass.chunk_size, pass.chunks);
      run_from(*pass.args.source);
    } else {
      for (std::int64_t c = next_chunk.fetch_add(1); c < pass.chunks; c = next_chunk.fetch_add(1)) {
        compute(c);
        done_chunks.fetch_add(1, std::memory_order_release);
      }
    }
    if (!join()) return;
    for (std::int64_t b = next_block.fetch_add(1); b < column_blocks; b = next_block.fetch_add(1)) {
      const TraceSpan span(Stage::kReduce, pass.args.layer, b);
      sums.reduce(pass.table.axpy[static_cast<int>(DType::kF32)], b, pass.y_TW);
    }
  }

  void compute(std::int64_t c) const {
    double* squares_T = pass.squares_CT == nullptr ? nullptr : pass.squares_CT + c * pass.tokens;
    pass.used[c] =
        run_chunk(pass, c, pass.partials + c * pass.tokens * pass.width, squares_T, made_of(pass.args, made, c));
  }

  // Waits for the chunks that other workers are computing; false if reading failed.
  bool join() const {
    const TraceSpan span(Stage::kJoin, pass.args.layer);
    while (done_chunks.load(std::memory_order_acquire) < pass.chunks) {
      if (pass.args.source != nullptr && pass.args.source->failed()) return false;
      std::this_thread::yield();
    }
    return true;
  }

  // Chunks in the order in which their neurons arrive; partial sums are still added in chunk order.
  void run_from(NeuronSource& source) {
    for (std::int64_t c = source.next(); c >= 0; c = source.next()) {
      compute(c);
      source.done(c);
      done_chunks.fetch_add(1, std::memory_order_release);
    }
  }
};

// The gates of all neurons for every token of the pass, and their sums and sums of squares by chunk.
struct Gates {
  const Pass& pass;
  float* gates_NT;
  double* sums_CT2;
  std::atomic<std::int64_t> next_chunk{0};
  std::atomic<bool> begun{false};

  void run() {
    NeuronSource* const source = pass.args.source;
    if (source == nullptr) {
      for (std::int64_t c = next_chunk.fetch_add(1); c < pass.chunks; c = next_chunk.fetch_add(1)) compute(c);
      return;
    }
    if (!begun.exchange(true)) source->begin(pass.ids, pass.counts, pass.chunk_size, pass.chunks);
    for (std::int64_t c = source->next(); c >= 0; c = source->next()) {
      compute(c);
      source->done(c);
    }
  }

  void compute(std::int64_t chunk) const {
    const TraceSpan span(Stage::kCompute, pass.args.layer, chunk);
    const FfnArgs& args = pass.args;
    const std::int64_t begin = chunk * pass.chunk_size, end = std::min(begin + pass.chunk_size, args.neurons);
    Tokens everyone;
    for (std::int64_t t = 0; t < pass.tokens; ++t) everyone.add(t, pass.x_TW, pass.width);
    double* sums_T2 = sums_CT2 + chunk * pass.tokens * 2;
    std::fill_n(sums_T2, pass.tokens * 2, 0.0);
    std::int64_t ids[2 * kDotRows];
    for (std::int64_t i = begin; i < end; i += kDotRows) {
      for (std::int64_t k = 0; k < 2 * kDotRows; ++k) ids[k] = std::min(i + k, end - 1);
      const std::int64_t some = std::min(kDotRows, end - i);
      pass.dot(ids, some, 0, 1, everyone, gates_NT + i * pass.tokens, ids + kDotRows);
      for (std::int64_t k = 0; k < some; ++k) {
        const float bias = pass.bias(args.rows == 3 ? args.bias_gate : args.bias_up, i + k);
        for (std::int64_t t = 0; t < pass.tokens; ++t) {
          const double v = gates_NT[(i + k) * pass.tokens + t] + bias;
          sums_T2[2 * t] += v;
          sums_T2[2 * t + 1] += v * v;
        }
      }
    }
    Counters done;
    done.gate_rows = (end - begin) * pass.tokens;
    count(done);
  }

  // mean + sigmas * deviation of each token; chunks are added in order.
  void cut(float* cut_T) const {
    const auto n = static_cast<double>(pass.args.neurons);
    for (std::int64_t t = 0; t < pass.tokens; ++t) {
      double sum = 0, squares = 0;
      for (std::int64_t c = 0; c < pass.chunks; ++c) {
        sum += sums_CT2[(c * pass.tokens + t) * 2];
        squares += sums_CT2[(c * pass.tokens + t) * 2 + 1];
      }
      const double mean = sum / n, variance = squares / n - mean * mean;
      const double deviation = std::sqrt(variance < 0 ? 0 : variance);  // NaN stays
      cut_T[t] = static_cast<float>(mean + static_cast<double>(pass.args.shaping.sigmas) * deviation);
    }
  }
};

// Converts inputs before, and sums after a pass.
struct Tokenwise {
  const FfnArgs& args;
  const KernelTable& table;
  std::int64_t width;
  float* plain_H;  // one token in plain order

  Tokenwise(const FfnArgs& args_, const KernelTable& table_, float* plain)
      : args(args_), table(table_), width(ffn_width(args_)), plain_H(plain) {}

  static std::int64_t ffn_width(const FfnArgs& args) {
    return is_quantized(args.dtype_of_down()) ? padded(args.hidden) : args.hidden;
  }

  const char* row(const void* matrix, std::int64_t token) const {
    return static_cast<const char*>(matrix) + token * row_bytes(args.x_dtype, args.hidden);
  }

  void in(std::int64_t token, float* x_W) const {
    const int w = static_cast<int>(args.w_dtype);
    const PrepareFn prepare = takes_up_blocks(args)   ? table.prepare_gemm[w]
                              : args.int8_activations ? table.prepare_a8[w]
                                                      : table.prepare[w];
    widen(row(args.x, token), args.x_dtype, prepare == nullptr ? x_W : plain_H, args.hidden);
    if (prepare != nullptr) prepare(plain_H, args.hidden, x_W);
  }

  // Converts a sum from axpy order to plain order.
  void plain(const float* y_W, float* out_H) const {
    const RestoreFn restore = table.restore[static_cast<int>(args.dtype_of_down())];
    if (restore != nullptr)
      restore(y_W, args.hidden, out_H);
    else
      std::memcpy(out_H, y_W, static_cast<std::size_t>(args.hidden) * sizeof(float));
  }

  // `squares`: of the token's h, if there is a norm.
  void out(std::int64_t token, float* y, double squares) const {
    const RestoreFn restore = table.restore[static_cast<int>(args.dtype_of_down())];
    if (restore != nullptr) {
      restore(y, args.hidden, plain_H);
      y = plain_H;
    }
    if (args.shaping.norms()) {
      const float factor = norm_factor(args, squares);
      for (std::int64_t k = 0; k < args.hidden; ++k) y[k] *= factor;
    }
    if (args.bias_down != nullptr)
      for (std::int64_t k = 0; k < args.hidden; ++k) y[k] += load_float(args.bias_down, args.bias_dtype(), k);
    narrow(y, const_cast<char*>(row(args.y, token)), args.x_dtype, args.hidden);
  }
};

// The squares of a token's h, chunk by chunk.
double squares_of(const Pass& pass, std::int64_t token) {
  double sum = 0;
  for (std::int64_t c = 0; pass.squares_CT != nullptr && c < pass.chunks; ++c)
    if (pass.used[c]) sum += pass.squares_CT[c * pass.tokens + token];
  return sum;
}

// Copies the partial sums of a call's only pass, in plain order.
void copy_parts(const Pass& pass, const Tokenwise& tokenwise) {
  const FfnArgs& args = pass.args;
  for (std::int64_t i = 0; i < pass.chunks * pass.tokens; ++i) {
    float* part = args.parts + i * args.hidden;
    if (pass.used[i / pass.tokens])
      tokenwise.plain(pass.partials + i * pass.width, part);
    else
      std::memset(part, 0, static_cast<std::size_t>(args.hidden) * sizeof(float));
  }
}

// Many tokens with a source: chunk by chunk, each for all tokens, so that a layer is read once. The bits are those of
// any other order, because a token's chunks are added one by one in chunk order.
class Stream {
 public:
  Stream(const FfnArgs& args, const KernelTable& table, const ParallelFor& parallel)
      : args_(args),
        table_(table),
        parallel_(parallel),
        width_(Tokenwise::ffn_width(args)),
        cut_(args),
        chunks_(cut_.count),
        call_(args) {
    const std::int64_t most = std::min(kPromptTokens, args.tokens), workers = std::max(1, parallel.threads);
    const std::int64_t rounds = (most + kPassTokens * workers - 1) / (kPassTokens * workers);
    tile_ = (most + rounds * workers - 1) / (rounds * workers);
    const std::int64_t tiles = (most + tile_ - 1) / tile_;
    x_TW_ = scratch(Scratch::kInput, 2 * most * width_ + args.hidden);
    y_TW_ = x_TW_ + most * width_;
    plain_H_ = y_TW_ + most * width_;
    partials_ = scratch(Scratch::kPartials, most * width_);
    const std::int64_t keep_floats = (args.neurons + 3) / 4;
    ids_ = reinterpret_cast<std::int64_t*>(
        scratch(Scratch::kIds, 2 * ((2 * tiles + 1) * args.neurons + chunks_) + keep_floats));
    if (takes_up_blocks(args)) made_ = reinterpret_cast<char*>(scratch(Scratch::kBlocks, tiles * made_bytes(args) / 4));
    counts_ = ids_ + args.neurons;
    tile_ids_ = counts_ + chunks_;
    keep_ = reinterpret_cast<std::uint8_t*>(tile_ids_ + 2 * tiles * args.neurons);
  }

  void run() {
    const std::int64_t most = std::min(kPromptTokens, args_.tokens);
    const Tokenwise tokenwise(args_, table_, plain_H_);
    for (std::int64_t start = 0; start < args_.tokens; start += most) {
      tokens_ = std::min(most, args_.tokens - start);
      active_ = args_.active == nullptr ? nullptr : args_.active + start * cold();
      for (std::int64_t t = 0; t < tokens_; ++t) tokenwise.in(start + t, x_TW_ + t * width_);
      std::memset(y_TW_, 0, static_cast<std::size_t>(tokens_ * width_) * sizeof(float));
      std::fill_n(squares_T_, tokens_, 0.0);
      const std::int64_t tiles = (tokens_ + tile_ - 1) / tile_;
      firing_ = call_.next(tokens_);
      if (firing_ != nullptr) fired_.assign(static_cast<std::size_t>(tiles * cut_.size), 0);
      begin(!args_.more && start + most >= args_.tokens);
      for (std::int64_t c = args_.source->next(); c >= 0; c = args_.source->next()) {
        chunk_ = c;
        next_tile_ = 0;
        parallel_.run(
            parallel_.host, std::min<std::int64_t>(std::max(1, parallel_.threads), tiles),
            [](void* self, std::int64_t) { static_cast<Stream*>(self)->some_tiles(); }, this);
        if (firing_ != nullptr) count_fired(tiles);
        args_.source->done(c);
      }
      if (args_.source->failed()) return;
      for (std::int64_t t = 0; t < tokens_; ++t) tokenwise.out(start + t, y_TW_ + t * width_, squares_T_[t]);
    }
  }

 private:
  std::int64_t cold() const { return args_.neurons - args_.n_hot; }

  // A pass over the tokens [first, first + count).
  Pass pass(std::int64_t first, std::int64_t count, std::int64_t* ids, std::uint64_t* wanted) const {
    Pass made{args_,
              table_,
              width_,
              x_TW_ + first * width_,
              active_ == nullptr ? nullptr : active_ + first * cold(),
              count,
              nullptr,
              nullptr,
              nullptr,
              ids,
              wanted,
              cut_.base,
              cut_.size,
              chunks_};
    made.where = args_.source->neuron_rows();
    made.up_blocks = made_ != nullptr;
    return made;
  }

  void begin(bool last) {
    args_.source->expect(chunks_, true, last);
    const Pass all = pass(0, tokens_, ids_, nullptr);
    for (std::int64_t c = 0; c < chunks_; ++c) counts_[c] = gather(all, c);
    if (active_ != nullptr) {
      const std::int64_t last = std::max<std::int64_t>(0, tokens_ - kLastTokens);
      std::memset(keep_, 1, static_cast<std::size_t>(args_.n_hot));
      std::memset(keep_ + args_.n_hot, 0, static_cast<std::size_t>(cold()));
      for (std::int64_t t = last; t < tokens_; ++t)
        for (std::int64_t i = 0; i < cold(); ++i) keep_[args_.n_hot + i] |= active_[t * cold() + i];
    }
    args_.source->begin(ids_, counts_, cut_.size, chunks_, active_ == nullptr ? nullptr : keep_);
  }

  void some_tiles() {
    const AxpyFn add = table_.axpy[static_cast<int>(DType::kF32)];
    const float one = 1;
    for (std::int64_t i = next_tile_.fetch_add(1); i * tile_ < tokens_; i = next_tile_.fetch_add(1)) {
      const std::int64_t first = i * tile_, count = std::min(tile_, tokens_ - first);
      float* part_TW = partials_ + first * width_;
      std::int64_t* ids = tile_ids_ + 2 * i * args_.neurons;
      Pass tile = pass(first, count, ids, count == 1 ? nullptr : reinterpret_cast<std::uint64_t*>(ids + args_.neurons));
      tile.firing = firing_;
      if (firing_ != nullptr) tile.fired = fired_.data() + i * cut_.size;
      double squares_T[kPassTokens] = {};
      if (!run_chunk(tile, chunk_, part_TW, squares_T, made_of(args_, made_, i))) continue;
      for (std::int64_t t = 0; t < count; ++t) {
        squares_T_[first + t] += squares_T[t];
        const void* part = part_TW + t * width_;
        add(y_TW_ + (first + t) * width_, &part, &one, 1, width_, nullptr);  // 1 * part is exact
      }
    }
  }

  // Counts the bits that the tiles stored for the chunk. With groups there are at most 64 tokens.
  void count_fired(std::int64_t tiles) {
    for (std::int64_t i = 0; i < cut_.size; ++i) {
      const std::int64_t neuron = cut_.base + chunk_ * cut_.size + i;
      std::uint64_t all = 0;
      for (std::int64_t tile = 0; tile < tiles; ++tile) {
        std::uint64_t& bits = fired_[static_cast<std::size_t>(tile * cut_.size + i)];
        if (bits == 0) continue;
        if (firing_->sizes > 0)
          all |= bits << tile * tile_;
        else
          firing_->add(neuron, bits);
        bits = 0;
      }
      if (all != 0) firing_->add(neuron, all);
    }
  }

  const FfnArgs& args_;
  const KernelTable& table_;
  const ParallelFor& parallel_;
  const std::int64_t width_;
  const Chunks cut_;
  const std::int64_t chunks_;
  FiringCall call_;
  const FiringCounters* firing_ = nullptr;
  std::vector<std::uint64_t> fired_;  // [tiles, neurons of a chunk]
  std::int64_t tile_ = 0, tokens_ = 0, chunk_ = 0;
  const std::uint8_t* active_ = nullptr;
  float *x_TW_, *y_TW_, *plain_H_, *partials_;
  std::int64_t *ids_, *counts_, *tile_ids_;
  std::uint8_t* keep_;
  double squares_T_[kPromptTokens];  // layers with a norm: of the h of the chunks so far
  char* made_ = nullptr;
  std::atomic<std::int64_t> next_tile_{0};
};

}  // namespace

bool takes_up_blocks(const FfnArgs& args) {
  return args.rows == 2 && args.int8_activations && (args.active == nullptr || args.all_fire) && !args.shaping.cuts() &&
         !args.shaping.norms() && is_quantized(args.w_dtype) &&
         kernels().dot_blocks[static_cast<int>(args.w_dtype)] != nullptr && in_blocks(kPanelRows, args.hidden);
}

void sparse_ffn(const FfnArgs& args, const ParallelFor& parallel) {
  const Timed timed(Timed::kFfn, args.neurons, args.hidden);
  const TraceSpan span(Stage::kFfn, args.layer, args.tokens);
  const KernelTable& table = kernels();
  const std::int64_t pairs = args.tokens * (args.neurons - args.first);
  count({1, args.tokens, pairs, 0, 0, 0, pairs * args.rows});
  const bool cuts = args.shaping.cuts();
  if (args.active == nullptr && !cuts && takes_panels(table, args.w_dtype, args.int8_activations, args.tokens))
    return ffn_prompt(args, table, parallel);
  if (args.source != nullptr && !cuts && args.tokens >= kStreamFrom) return Stream(args, table, parallel).run();
  const std::int64_t width = Tokenwise::ffn_width(args);
  const Chunks cut(args);
  const std::int64_t chunks = cut.count;
  const std::int64_t tile = std::min(kPassTokens, args.tokens);
  float* x_TW = scratch(Scratch::kInput, 2 * tile * width + args.hidden);
  float* y_TW = x_TW + tile * width;
  const Tokenwise tokenwise(args, table, y_TW + tile * width);
  float* partials = scratch(Scratch::kPartials, chunks * tile * width + chunks);
  auto* used = reinterpret_cast<std::uint8_t*>(partials + chunks * tile * width);
  // All memory is allocated here, on the calling thread: a worker that failed to allocate would leave others waiting.
  static_assert(sizeof(std::int64_t) == 2 * sizeof(float));
  auto* ids = reinterpret_cast<std::int64_t*>(scratch(Scratch::kIds, 2 * (2 * args.neurons + chunks)));
  auto* wanted = reinterpret_cast<std::uint64_t*>(ids + args.neurons + chunks);
  const std::int64_t sums = 2 * chunks * tile;
  double* squares = args.shaping.norms() ? reinterpret_cast<double*>(scratch(Scratch::kGates, 2 * sums)) : nullptr;
  const bool up_blocks = takes_up_blocks(args);
  char* made = nullptr;
  if (up_blocks && !args.up_blocks)
    made = reinterpret_cast<char*>(scratch(Scratch::kBlocks, chunks * made_bytes(args) / 4));
  float* gates = cuts ? scratch(Scratch::kGates, 2 * sums + (args.neurons + 1) * tile) : nullptr;

  FiringCall call(args);
  for (std::int64_t start = 0; start < args.tokens; start += tile) {
    const std::int64_t tokens = std::min(tile, args.tokens - start);
    for (std::int64_t t = 0; t < tokens; ++t) tokenwise.in(start + t, x_TW + t * width);
    const std::uint8_t* active = args.active == nullptr ? nullptr : args.active + start * (args.neurons - args.n_hot);
    Pass pass{
        args,     table,    width, x_TW, active, tokens, partials, used, y_TW, ids, tokens == 1 ? nullptr : wanted,
        cut.base, cut.size, chunks};
    pass.firing = call.next(tokens);
    pass.squares_CT = squares;
    pass.up_blocks = up_blocks;
    // Waking a thread costs a few microseconds: not worth it for less arithmetic.
    const bool tiny = tokens * (args.neurons - args.first) * args.rows * args.hidden < kTinyMacs;
    const std::int64_t most = std::max<std::int64_t>(1, chunks);
    const std::int64_t workers = tiny ? 1 : std::min<std::int64_t>(std::max(1, parallel.threads), most);
    if (args.source != nullptr) pass.counts = ids + args.neurons;
    if (cuts) {
      Gates all{pass, gates + 2 * sums, reinterpret_cast<double*>(gates)};
      if (args.source != nullptr) {
        for (std::int64_t c = 0; c < chunks; ++c) pass.counts[c] = gather(pass, c);  // without a cut all of them
        args.source->expect(chunks);
        pass.where = args.source->neuron_rows();
      }
      parallel.run(parallel.host, workers, [](void* g, std::int64_t) { static_cast<Gates*>(g)->run(); }, &all);
      if (args.source != nullptr && args.source->failed()) return;
      float* cut_T = all.gates_NT + args.neurons * tile;
      all.cut(cut_T);
      pass.gates_NT = all.gates_NT;
      pass.cut_T = cut_T;
    }
    if (args.source != nullptr) {
      for (std::int64_t c = 0; c < chunks; ++c) pass.counts[c] = gather(pass, c);
      args.source->expect(chunks);
      pass.where = args.source->neuron_rows();
    }
    const ChunkSums sums{partials, used, chunks, tokens, width};
    Work work{pass, sums, args.parts != nullptr ? 0 : sums.blocks(), made};
    parallel.run(parallel.host, workers, [](void* w, std::int64_t) { static_cast<Work*>(w)->run(); }, &work);
    if (args.source != nullptr && args.source->failed()) return;
    if (args.parts != nullptr)
      copy_parts(pass, tokenwise);
    else
      for (std::int64_t t = 0; t < tokens; ++t) tokenwise.out(start + t, y_TW + t * width, squares_of(pass, t));
  }
}

void predict_gate(const FfnArgs& layer, const void* rows, std::uint8_t* active, const ParallelFor& parallel) {
  const Timed timed(Timed::kPredictor, layer.neurons - layer.n_hot, layer.hidden);
  const TraceSpan span(Stage::kPredict, layer.neurons - layer.n_hot, layer.tokens);
  FfnArgs args = layer;  // a layer whose neurons are these rows
  args.source = nullptr;
  args.neuron_rows = rows;
  const bool blocks_of_ups = takes_up_blocks(layer);
  args.rows = blocks_of_ups ? 2 : 1;
  args.apart = args.row_bytes();  // only the first rows are used
  args.bias_up = layer.rows == 3 ? layer.bias_gate : layer.bias_up;
  const std::int64_t width = Tokenwise::ffn_width(args);
  float* x_TW = scratch(Scratch::kInput, args.tokens * width + args.hidden);
  const Tokenwise tokenwise(args, kernels(), x_TW + args.tokens * width);
  for (std::int64_t t = 0; t < args.tokens; ++t) tokenwise.in(t, x_TW + t * width);

  struct Blocks {
    Pass pass;
    std::uint8_t* active;
    Tokens everyone;
    char* made;  // [blocks], see products()

    // As run().
    void run_blocks(std::int64_t block) const {
      const FfnArgs& of = pass.args;
      const std::int64_t first = of.n_hot + block * kScan, end = std::min(first + kScan, of.neurons);
      std::int64_t ids[kScan];
      for (std::int64_t i = first; i < end; ++i) ids[i - first] = i;
      float gate_TN[kPassTokens * kTogether];
      for (std::int64_t i = first; i < end; i += kTogether) {
        const std::int64_t n = std::min(kTogether, end - i);
        products(pass, ids + i - first, n, end - i, made_of(of, made, block), gate_TN);
        for (std::int64_t t = 0; t < pass.tokens; ++t)
          for (std::int64_t k = 0; k < n; ++k) mark(t, i + k, gate_TN[t * kTogether + k]);
      }
    }

    void mark(std::int64_t t, std::int64_t neuron, float gate) const {
      const FfnArgs& of = pass.args;
      const float value = activate(of, gate + pass.bias(of.bias_up, neuron));
      const bool fires = !(std::fabs(value) <= of.threshold_of(neuron));  // as in fire()
      active[t * (of.neurons - of.n_hot) + neuron - of.n_hot] = fires;
    }

    void run(std::int64_t block) const {
      if (pass.up_blocks) return run_blocks(block);
      const TraceSpan rows_span(Stage::kPredictRows, block);
      const FfnArgs& of = pass.args;
      const std::int64_t first = of.n_hot + block * kScan, end = std::min(first + kScan, of.neurons);
      std::int64_t ids[2 * kDotRows];
      float gate_NT[kDotRows * kPassTokens];
      for (std::int64_t i = first; i < end; i += kDotRows) {
        for (std::int64_t k = 0; k < 2 * kDotRows; ++k) ids[k] = std::min(i + k, end - 1);
        const std::int64_t some = std::min(kDotRows, end - i);
        pass.dot(ids, some, 0, 1, everyone, gate_NT, ids + kDotRows);
        for (std::int64_t k = 0; k < some; ++k)
          for (std::int64_t t = 0; t < pass.tokens; ++t) mark(t, i + k, gate_NT[k * pass.tokens + t]);
      }
    }
  };
  Pass pass{args, kernels(), width, x_TW, nullptr, args.tokens, nullptr, nullptr, nullptr, nullptr, nullptr, 0, 0, 0};
  pass.up_blocks = blocks_of_ups;
  const std::int64_t scans = (args.neurons - args.n_hot + kScan - 1) / kScan;
  char* made =
      blocks_of_ups ? reinterpret_cast<char*>(scratch(Scratch::kBlocks, scans * made_bytes(args) / 4)) : nullptr;
  Blocks blocks{pass, active, {}, made};
  for (std::int64_t t = 0; t < args.tokens; ++t) blocks.everyone.add(t, x_TW, width);
  const std::int64_t cold = args.neurons - args.n_hot;
  Dynamic::run(
      args.tokens * cold * args.hidden < kTinyMacs ? serial() : parallel, (cold + kScan - 1) / kScan,
      [](void* b, std::int64_t block) { static_cast<const Blocks*>(b)->run(block); }, &blocks);
  Counters done;
  done.gate_rows = cold * args.tokens;
  count(done);
}

}  // namespace pi2
