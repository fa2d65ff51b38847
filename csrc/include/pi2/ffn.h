// The sparse feed-forward layer over neuron bundles, and the low-rank activation predictor.
#pragma once

#include <cstdint>

#include "pi2/types.h"

namespace pi2 {

// Neurons per chunk. Each chunk has its own partial sum and partial sums are added in chunk order, so the output has
// the same bits for any number of threads (design D5). A function of the layer alone and part of the numeric contract:
// at most 16 chunks, enough for 16 threads, since every partial sum is hidden floats written and read again.
constexpr std::int64_t chunk_neurons(std::int64_t neurons) {
  const std::int64_t sixteenth = (neurons + 15) / 16;
  return (sixteenth + 63) / 64 * 64;
}

// y[t] = sum over computed neurons i of h_i(x[t]) * down_i + bias_down.
// The first n_hot neurons are always computed. A cold neuron contributes to token t iff active is null or
// active[t * (n - n_hot) + i - n_hot] != 0, and |act(gate)| > threshold (NaN counts as firing, so it is seen).
struct FfnArgs {
  const void* x = nullptr;  // [tokens, hidden], x_dtype
  void* y = nullptr;        // [tokens, hidden], x_dtype
  DType x_dtype = DType::kF32;
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  const void* bundles = nullptr;  // [neurons, rows, hidden], w_dtype; rows: 3 = gate, up, down; 2 = up, down
  DType w_dtype = DType::kF32;
  std::int64_t neurons = 0;
  std::int64_t rows = 3;
  const void* bias_gate = nullptr;  // [neurons] or null, w_dtype
  const void* bias_up = nullptr;    // [neurons] or null
  const void* bias_down = nullptr;  // [hidden] or null
  const std::uint8_t* active = nullptr;
  std::int64_t n_hot = 0;
  Activation activation = Activation::kRelu;
  bool activation_on_up = false;
  float threshold = 0;
};

void sparse_ffn(const FfnArgs& args, const ParallelFor& parallel);

// active[t, c] = !(b[c] . relu(a x[t]) * b_scale[c] + b_bias[c] < threshold), a and b int8 with a scale per row.
struct LowrankArgs {
  const void* x = nullptr;  // [tokens, hidden], x_dtype
  DType x_dtype = DType::kF32;
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  const std::int8_t* a = nullptr;  // [rank, hidden]
  const float* a_scale = nullptr;  // [rank]
  std::int64_t rank = 0;
  const std::int8_t* b = nullptr;  // [cold, rank]
  const float* b_scale = nullptr;  // [cold]
  const float* b_bias = nullptr;   // [cold] or null
  std::int64_t cold = 0;
  float threshold = 0;
  std::uint8_t* active = nullptr;  // [tokens, cold]
};

void predict_lowrank(const LowrankArgs& args, const ParallelFor& parallel);

// Reads the given bundles (index null: all of them, in order) and does nothing with them: the roofline.
std::uint64_t read_bundles(const void* bundles, std::int64_t bundle_bytes, std::int64_t count,
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
