// The sparse feed-forward layer over neurons' rows.
#pragma once

#include <cstdint>

#include "pi2/types.h"

namespace pi2 {

// Neurons per chunk. Each chunk has its own partial sum and partial sums are added in chunk order, so the output has
// the same bits for any number of threads (design D5). A function of the layer alone and part of the numeric contract:
// at most 16 chunks, enough for 16 threads, since every partial sum is hidden floats written and read again.
// Prompts (kGemmTokens in linear.h) with int8 activations and no mask go by tiles instead, where the instruction set
// has them: one sum per token over all neurons, other bits than token by token, the same for any number of threads.
constexpr std::int64_t kChunks = 16;
constexpr std::int64_t chunk_neurons(std::int64_t neurons) {
  const std::int64_t sixteenth = (neurons + kChunks - 1) / kChunks;
  return (sixteenth + 63) / 64 * 64;
}

// Neurons where chunks begin to be counted if an accelerator has those before `first`: a power of two that slots of a
// store divide, so that none is in two chunks.
constexpr std::int64_t chunk_base(std::int64_t first) { return first / 64 * 64; }

// Tokens of a pass over the weights, of layers and of predictors: bounds the scratch of partial sums.
constexpr std::int64_t kPassTokens = 64;
// From so many tokens on a layer of a store is streamed.
constexpr std::int64_t kStreamFrom = 32;
// Tokens of a prompt for which a layer's neurons are read once.
constexpr std::int64_t kPromptTokens = 512;
// Neurons of a prompt's chunk: whose h is held at a time, and their down rows in float.
constexpr std::int64_t kPromptNeurons = 512;

// Where neurons come from that are not all in memory: see pi2/offload.h. Of one call of sparse_ffn at a time: expect,
// then begin from one of its workers, and next and done from all of them until next has nothing left.
class NeuronSource {
 public:
  virtual ~NeuronSource() = default;
  // Decides about marks of kIfThere (pi2/predict.h) in active [tokens, neurons - n_hot], before expect: 1 for a neuron
  // that is in memory or that another token wants anyway, else 0.
  virtual void leave_out_missing(std::uint8_t* active, std::int64_t tokens, std::int64_t n_hot) = 0;
  // begin is going to be called for so many chunks; again within a call, for further tokens, when every chunk of the
  // time before is done. `stream`: next gives chunks in ascending order, and what is read for them is not kept: a
  // prompt wants nearly all of a layer, and would leave nothing in a cache of what is wanted often. `last`: the layer's
  // last tokens, after which another layer's are to be expected.
  virtual void expect(std::int64_t chunks, bool stream = false, bool last = true) = 0;
  // Chunk c < `chunks` of the layer is going to read the neurons ids[c * chunk_size + k], k < counts[c], ascending.
  // Other workers may be in next() already. `keep` [neurons], used until the last chunk is done: of a stream, the
  // neurons that are kept all the same, because the tokens after it are likely to want them.
  virtual void begin(const std::int64_t* ids, const std::int64_t* counts, std::int64_t chunk_size, std::int64_t chunks,
                     const std::uint8_t* keep = nullptr) = 0;
  // A chunk whose neurons are there, each once, in the order in which they come (but see expect); waits for it. -1: all
  // have been given out, or reading has failed.
  virtual std::int64_t next() = 0;
  virtual void done(std::int64_t chunk) = 0;
  // Where each neuron's rows are; from expect on, of those that next has announced.
  virtual const char* const* neuron_rows() const = 0;
  virtual bool failed() const = 0;
};

// y[t] = sum over computed neurons i of h_i(x[t]) * down_i + bias_down.
// The first n_hot neurons are always computed. A cold neuron contributes to token t iff active is null or
// active[t * (n - n_hot) + i - n_hot] != 0, and |act(gate)| > its threshold (NaN counts as firing, so it is seen).
// With `first` neurons left out, a multiple of 64, the bits are those of a layer that consists of the others.
struct FfnArgs {
  const void* x = nullptr;  // [tokens, hidden], x_dtype
  void* y = nullptr;        // [tokens, hidden], x_dtype
  // [chunks, tokens, hidden] in the place of y: the partial sum of each chunk, without bias_down, of fewer tokens than
  // kGemmTokens (linear.h) and kStreamFrom; what other machines have of a layer's chunks is added elsewhere.
  float* parts = nullptr;
  DType x_dtype = DType::kF32;
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  // [neurons, rows] rows of hidden numbers; rows: 3 = gate, up, down; 2 = up, down
  const void* neuron_rows = nullptr;
  NeuronSource* source = nullptr;  // instead of neurons; if it fails, y means nothing
  std::int64_t layer = -1;         // its number in a store
  const void* owner = nullptr;     // that store (pi2/firing.h); null: the neurons say which layer it is
  bool more = false;               // the same layer is going to be called for further tokens of the same prompt
  bool piece = false;              // there are other calls for tokens of the same prompt
  DType w_dtype = DType::kF32;     // of gate and up rows, and of down rows, unless these have
  DType down_dtype = DType::kF32;  // with other_down: quantised
  bool other_down = false;
  std::int64_t neurons = 0;
  std::int64_t chunk = 0;  // neurons of a chunk, a multiple of 64: of some chunks of a larger layer; 0: chunk_neurons
  std::int64_t rows = 3;
  // Quantised weights: dots take x as int8 with a scale per 32 instead of float (lossy, faster); down rows do not.
  bool int8_activations = false;
  const void* bias_gate = nullptr;  // [neurons] or null, bias_dtype()
  const void* bias_up = nullptr;    // [neurons] or null
  const void* bias_down = nullptr;  // [hidden] or null
  const std::uint8_t* active = nullptr;
  std::int64_t n_hot = 0;
  std::int64_t first = 0;  // neurons before it are somebody else's: not computed here, not read, not counted
  Activation activation = Activation::kRelu;
  Shaping shaping;
  bool activation_on_up = false;
  float threshold = 0;
  const float* thresholds = nullptr;  // [neurons], in its place

  float threshold_of(std::int64_t neuron) const {  // hot neurons know none
    if (neuron < n_hot) return 0.0f;
    return thresholds == nullptr ? threshold : thresholds[neuron];
  }
  std::int64_t chunk_size() const { return chunk > 0 ? chunk : chunk_neurons(neurons - chunk_base(first)); }
  std::int64_t chunks() const {
    const std::int64_t size = chunk_size();
    return size == 0 ? 0 : (neurons - chunk_base(first) + size - 1) / size;
  }
  DType dtype_of_down() const { return other_down ? down_dtype : w_dtype; }
  DType bias_dtype() const { return is_quantized(dtype_of_down()) ? DType::kF32 : w_dtype; }
  std::int64_t row_bytes() const { return pi2::row_bytes(w_dtype, hidden); }  // of gate and up
  std::int64_t down_offset() const { return (rows - 1) * row_bytes(); }       // in a neuron
  std::int64_t neuron_bytes() const { return down_offset() + pi2::row_bytes(dtype_of_down(), hidden); }
};

void sparse_ffn(const FfnArgs& args, const ParallelFor& parallel);

// y[t] = the sum of parts[order[i]][t] for i < count, one by one from zero on, + bias: as sparse_ffn adds its chunks.
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

// Reads the given neurons (index null: all of them, in order) and does nothing with them: the roofline.
std::uint64_t plain_read(const void* neuron_rows, std::int64_t neuron_bytes, std::int64_t count,
                         const std::int64_t* index, const ParallelFor& parallel);

// Work done since the last reset, in (token, neuron) pairs; what an honest sparsity figure is made from.
struct Counters {
  std::int64_t calls = 0;
  std::int64_t tokens = 0;
  std::int64_t neurons = 0;     // pairs a dense layer would have computed
  std::int64_t gate_rows = 0;   // pairs whose first matrix row was used
  std::int64_t up_rows = 0;     // pairs whose up row was used (gated layers)
  std::int64_t down_rows = 0;   // pairs whose down column was used
  std::int64_t dense_rows = 0;  // matrix rows a dense layer would have used
};

Counters read_counters();
void reset_counters();

}  // namespace pi2
