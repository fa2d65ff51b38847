// The sparse feed-forward layer over neurons' rows.
#pragma once

#include <cstdint>

#include "pi2/types.h"

namespace pi2 {

// Neurons per chunk. Each chunk has its own partial sum, and partial sums are added in chunk order, so the output has
// the same bits for any number of threads (design D5). The number depends on the layer alone and is part of the numeric
// contract: at most 16 chunks, enough for 16 threads, since every partial sum is `hidden` floats written and read
// again. Prompts (kGemmTokens in linear.h) with int8 activations and no mask are computed by tiles where the
// instruction set has them: one sum per token over all neurons. These bits differ from those token by token, but not
// with the threads.
constexpr std::int64_t kChunks = 16;
constexpr std::int64_t chunk_neurons(std::int64_t neurons) {
  const std::int64_t sixteenth = (neurons + kChunks - 1) / kChunks;
  return (sixteenth + 63) / 64 * 64;
}

// The neuron at which the first chunk begins if an accelerator has the neurons before `first`: a multiple of 64, which
// slots of a store divide, so that no slot is in two chunks.
constexpr std::int64_t chunk_base(std::int64_t first) { return first / 64 * 64; }

// Tokens per pass over the weights of a layer or predictor: bounds the scratch memory for partial sums.
constexpr std::int64_t kPassTokens = 64;
// Calls of at least this many tokens stream a layer of a store.
constexpr std::int64_t kStreamFrom = 32;
// Tokens of a prompt that share one read of a layer's neurons.
constexpr std::int64_t kPromptTokens = 512;
// Neurons of a prompt's chunk: their h, and their down rows in float, are held at a time.
constexpr std::int64_t kPromptNeurons = 512;

// Source of neurons that are not all in memory: see pi2/offload.h. One call of sparse_ffn at a time uses it: expect,
// then begin from one of its workers, and next and done from all of them until next returns -1.
class NeuronSource {
 public:
  virtual ~NeuronSource() = default;
  // Before expect: replaces marks of kIfThere (pi2/predict.h) in active [tokens, neurons - n_hot] by 1 for a neuron
  // that is in memory or that another token needs anyway, else by 0.
  virtual void leave_out_missing(std::uint8_t* active, std::int64_t tokens, std::int64_t n_hot) = 0;
  // begin will be called for this many chunks. Called again within a call, for further tokens, when all chunks are
  // done. `stream`: next returns chunks in ascending order, and their neurons are not cached: a prompt needs nearly all
  // of a layer and would flush the cache. `last`: these are the layer's last tokens; another layer comes next.
  virtual void expect(std::int64_t chunks, bool stream = false, bool last = true) = 0;
  // Chunk c < `chunks` needs the neurons ids[c * chunk_size + k], k < counts[c], ascending. Other workers may be in
  // next() already. `keep` [neurons], valid until the last chunk is done: neurons of a stream that are cached all the
  // same, because the tokens after it are likely to need them.
  virtual void begin(const std::int64_t* ids, const std::int64_t* counts, std::int64_t chunk_size, std::int64_t chunks,
                     const std::uint8_t* keep = nullptr) = 0;
  // Waits for a chunk whose neurons are in memory and returns it, each chunk once, in order of arrival (but see
  // expect). -1: all chunks have been returned, or reading has failed.
  virtual std::int64_t next() = 0;
  virtual void done(std::int64_t chunk) = 0;
  // Address of each neuron's rows; valid for the chunks that next has returned since expect.
  virtual const char* const* neuron_rows() const = 0;
  virtual bool failed() const = 0;
};

// y[t] = sum over computed neurons i of h_i(x[t]) * down_i + bias_down.
// The first n_hot neurons are always computed. A cold neuron contributes to token t iff active is null or
// active[t * (n - n_hot) + i - n_hot] != 0, and |act(gate)| > its threshold (NaN counts as firing, so it is seen).
// If `first` is a multiple of 64, the bits are those of a layer without the first neurons.
struct FfnArgs {
  const void* x = nullptr;  // [tokens, hidden], x_dtype
  void* y = nullptr;        // [tokens, hidden], x_dtype
  // [chunks, tokens, hidden], instead of y: the partial sum of each chunk, without bias_down. For fewer tokens than
  // kGemmTokens (linear.h) and kStreamFrom. add_parts() adds them to the partial sums of other machines.
  float* parts = nullptr;
  DType x_dtype = DType::kF32;
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  // [neurons, rows] rows of hidden numbers; rows: 3 = gate, up, down; 2 = up, down
  const void* neuron_rows = nullptr;
  // Without gates: 0, or the distance in bytes of a neuron's down row from its up row; up rows then lie one behind the
  // other, and so do down rows. `up_blocks`: up rows in blocks (kernels.h); needs takes_up_blocks(), and `first` a
  // multiple of 16.
  std::int64_t apart = 0;
  bool up_blocks = false;
  NeuronSource* source = nullptr;   // instead of neuron_rows; if it fails, y is undefined
  const char* gate_rows = nullptr;  // not null: the first rows of all neurons; the source then has the other rows alone
  std::int64_t layer = -1;          // its number in a store
  const void* owner = nullptr;      // that store (pi2/firing.h); null: neuron_rows identify the layer
  bool more = false;                // the same layer will be called for further tokens of the same prompt
  bool piece = false;               // one of several calls for the same prompt
  DType w_dtype = DType::kF32;      // of gate and up rows, and of down rows unless other_down
  DType down_dtype = DType::kF32;   // with other_down: in bytes
  bool other_down = false;
  std::int64_t neurons = 0;
  std::int64_t chunk =
      0;  // neurons per chunk, a multiple of 64, if these are some chunks of a larger layer; 0: chunk_neurons
  std::int64_t rows = 3;
  // Quantised weights: gate and up products take x as int8 with a scale per 32 (lossy, faster); down rows do not.
  bool int8_activations = false;
  const void* bias_gate = nullptr;  // [neurons] or null, bias_dtype()
  const void* bias_up = nullptr;    // [neurons] or null
  const void* bias_down = nullptr;  // [hidden] or null
  const std::uint8_t* active = nullptr;
  bool all_fire = false;  // `active` marks those that fire, and no others
  std::int64_t n_hot = 0;
  std::int64_t first = 0;  // neurons before it are computed elsewhere: not computed, read or counted here
  Activation activation = Activation::kRelu;
  Shaping shaping;
  bool activation_on_up = false;
  float threshold = 0;
  const float* thresholds = nullptr;  // [neurons], instead of threshold

  float threshold_of(std::int64_t neuron) const {  // hot neurons have none
    if (neuron < n_hot) return 0.0f;
    return thresholds == nullptr ? threshold : thresholds[neuron];
  }
  std::int64_t chunk_size() const { return chunk > 0 ? chunk : chunk_neurons(neurons - chunk_base(first)); }
  std::int64_t chunks() const {
    const std::int64_t size = chunk_size();
    return size == 0 ? 0 : (neurons - chunk_base(first) + size - 1) / size;
  }
  DType dtype_of_down() const { return other_down ? down_dtype : w_dtype; }
  DType bias_dtype() const { return is_down_in_bytes(dtype_of_down()) ? DType::kF32 : w_dtype; }
  std::int64_t row_bytes() const { return pi2::row_bytes(w_dtype, hidden); }  // of gate and up
  std::int64_t down_offset() const { return (rows - 1) * row_bytes(); }       // in a neuron
  // Row r of a neuron in memory.
  const char* row_of(std::int64_t neuron, std::int64_t r) const {
    const auto* at = static_cast<const char*>(neuron_rows);
    return apart != 0 ? at + neuron * row_bytes() + r * apart : at + neuron * neuron_bytes() + r * row_bytes();
  }
  // Row r of a neuron of the source, which has its rows `at`.
  const char* row_at(const char* at, std::int64_t neuron, std::int64_t r) const {
    if (gate_rows == nullptr) return at + r * row_bytes();
    return r == 0 ? gate_rows + neuron * row_bytes() : at + (r - 1) * row_bytes();
  }
  std::int64_t neuron_bytes() const { return down_offset() + pi2::row_bytes(dtype_of_down(), hidden); }
};

// Whether a layer without gates takes int8 activations times blocks of 16 up rows, which are made of rows in another
// layout. This depends on the layer, the instruction set and whether there is a mask of a predictor, and on nothing
// else: blocks sum in another order than rows.
bool takes_up_blocks(const FfnArgs& args);

void sparse_ffn(const FfnArgs& args, const ParallelFor& parallel);

// y[t] = the sum over i < count, in this order, of parts[order[i]][t], + bias: the order in which sparse_ffn adds
// chunks.
struct PartsArgs {
  const float* parts = nullptr;         // [any, tokens, hidden]
  const std::int64_t* order = nullptr;  // [count]
  std::int64_t count = 0, tokens = 0, hidden = 0;
  const void* bias = nullptr;  // [hidden] or null
  DType bias_dtype = DType::kF32;
  void* y = nullptr;  // [tokens, hidden]
  DType y_dtype = DType::kF32;
};

void add_parts(const PartsArgs& args);

// Reads the given neurons (index null: all of them, in order) and computes nothing: the roofline.
std::uint64_t plain_read(const void* neuron_rows, std::int64_t neuron_bytes, std::int64_t count,
                         const std::int64_t* index, const ParallelFor& parallel);

// Work done since the last reset, in (token, neuron) pairs: the basis of sparsity figures.
struct Counters {
  std::int64_t calls = 0;
  std::int64_t tokens = 0;
  std::int64_t neurons = 0;     // pairs that a dense layer computes
  std::int64_t gate_rows = 0;   // pairs whose first matrix row was used
  std::int64_t up_rows = 0;     // pairs whose up row was used (gated layers)
  std::int64_t down_rows = 0;   // pairs whose down column was used
  std::int64_t dense_rows = 0;  // matrix rows that a dense layer uses
};

Counters read_counters();
void reset_counters();

}  // namespace pi2
