// Mixtures of experts: groups tokens by expert, computes each expert, and adds up the results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "pi2/ffn.h"
#include "pi2/predict.h"

namespace pi2 {

class Offload;
struct CallStats;

// y[t] = sum over slots j, in this order, of routing[t, j] * FFN of expert index[t, j] (x[t]). Computed in float32,
// from x widened to the sum, which is rounded once to x's dtype. A token's bits do not depend on other tokens (with
// int8 activations as far as those of sparse_ffn do not). A token that names an expert twice goes to it once.
struct ExpertsArgs {
  const void* x = nullptr;  // [tokens, hidden], x_dtype
  void* y = nullptr;        // [tokens, hidden], x_dtype
  DType x_dtype = DType::kF32;
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  const std::int64_t* index = nullptr;  // [tokens, slots]; the value `experts` means none and adds nothing
  const void* routing = nullptr;        // [tokens, slots], routing_dtype
  DType routing_dtype = DType::kF32;
  std::int64_t slots = 0;
  std::int64_t experts = 0;
};

// Long prompts are cut into slices with this many bytes of scratch (at least 64 tokens), so that memory does not grow
// with the prompt: per token its input, a copy of it where tokens are gathered, and `slots` results.
constexpr std::int64_t kExpertBytes = 1 << 26;
constexpr std::int64_t expert_slice(std::int64_t slots, std::int64_t hidden) {
  return std::max<std::int64_t>(64, kExpertBytes / ((slots + 2) * hidden * static_cast<std::int64_t>(sizeof(float))));
}

// The work of one expert for a slice.
struct ExpertWork {
  std::int64_t expert = 0;
  std::int64_t tokens = 0;            // 1 or more
  const std::int64_t* ids = nullptr;  // [tokens] token numbers within the slice, ascending, each once
  const float* x = nullptr;           // [all tokens of the slice, hidden]
  float* y = nullptr;                 // [tokens, hidden]
  std::int64_t hidden = 0;
  const std::int64_t* pairs = nullptr;  // [tokens]: of the whole call's [tokens, slots], the first that is the work's
};

// `layer` with the input, output and number of tokens of `work`. The input may be gathered in this thread's scratch
// memory: valid until the next call.
FfnArgs of_expert(FfnArgs layer, const ExpertWork& work);

// Computes experts, from memory or from a store.
class ExpertLayers {
 public:
  virtual ~ExpertLayers() = default;
  // All works of a slice in the order of compute(), before the first of them.
  virtual void announce(const ExpertWork* /*works*/, std::int64_t /*count*/, const ParallelFor& /*parallel*/) {}
  // Returns "" or an error message.
  virtual std::string compute(const ExpertWork& work, const ParallelFor& parallel) = 0;
};

// Computes one expert after the other, ascending. Returns "" or an error message: an index out of range (before
// anything is computed) or that of `layers`; y is undefined then.
std::string mix_experts(const ExpertsArgs& args, ExpertLayers& layers, const ParallelFor& parallel);

// Experts of equal sizes and settings: pointers are those of expert 0; the tensors of the others follow in memory.
struct ExpertStack {
  // Without x, y and tokens; over a store without neuron_rows. n_hot equals `first`: neurons computed elsewhere.
  FfnArgs layer;
  Predictor predictor;                 // without its cut; has rows for all neurons. kMask: a row for each pair
  const double* cuts = nullptr;        // [experts]: thresholds, or margins, of kinds kLowrank and kSignbit
  const double* thresholds = nullptr;  // [experts], of the layers; null: `layer` has one for all
  // Kind kGate: [experts], which of the matrices at predictor.gate_rows is the expert's; negative: none, and nothing
  // predicts what it wants.
  const std::int64_t* gates = nullptr;
};

// The layer and the predictor of a work; see of_expert.
FfnArgs layer_of(const ExpertStack& stack, const ExpertWork& work);
Predictor predictor_of(const ExpertStack& stack, const ExpertWork& work);

std::string experts_ffn(const ExpertsArgs& args, const ExpertStack& stack, const ParallelFor& parallel);

// A router that is one linear layer: a token goes to the `chosen` experts with the highest scores. Scores are
// weights x + bias; with a `correction`, sigmoid(weights x + bias) + correction.
struct Router {
  const void* weights = nullptr;      // [experts, hidden], dtype
  DType dtype = DType::kF32;          // a float type
  const float* bias = nullptr;        // [experts] or null
  const float* correction = nullptr;  // [experts] or null
  std::int64_t experts = 0, hidden = 0;
  std::int64_t chosen = 0;  // 1 to experts
};

// chosen_TK[t * chosen + j] = the experts of token t, the highest score first; of equal scores the lowest expert first.
void route(const Router& router, const float* x_TH, std::int64_t tokens, std::int64_t* chosen_TK);

// How often the early routing of a mixture is right. Thread-safe.
class GuessRecord {
 public:
  // The experts predicted for the next call.
  void guess(std::vector<std::int64_t> experts);
  // The experts that the call really uses: [pairs]; the value `experts` means none.
  void see(const std::int64_t* index, std::int64_t pairs, std::int64_t experts);
  // Whether at least half of the experts used lately had been predicted; else prefetch would be wasted. At first true.
  bool pays() const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::int64_t> guessed_;  // empty: no prediction
  double right_ = 1;                   // share predicted right, over some 20 calls
};

// The mixture that is computed next, in the same store.
struct NextExperts {
  Router router;
  GuessRecord* record = nullptr;  // null: always prefetch
  ExpertStack stack;              // its layer has sizes only
  std::int64_t first_layer = 0;
};

// As experts_ffn; expert e is layer first_layer + e of the store. Same bits, except where sparse_ffn computes prompts
// by tiles and where OffloadOptions::drop_experts skips experts (they add nothing; the other routing weights stay). For
// a few tokens, `next`, if set, is routed early with the input of this mixture, and the neurons that its experts are
// likely to need are prefetched. `record`, if set, has what was predicted for this mixture. `then`, if set, is called
// behind the reads of all experts, as by Offload::ffn; for long prompts it is not. The figures of the calls are added
// to `stats`, if set.
std::string stored_experts(const ExpertsArgs& args, const ExpertStack& stack, Offload& store, std::int64_t first_layer,
                           const ParallelFor& parallel, CallStats* stats = nullptr, const NextExperts* next = nullptr,
                           GuessRecord* record = nullptr, const std::function<void()>& then = nullptr);

}  // namespace pi2
