// Mixtures of experts: tokens grouped by the experts that they are routed to, and what those compute added up again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "pi2/ffn.h"
#include "pi2/predict.h"

namespace pi2 {

class Offload;
struct CallStats;

// y[t] = sum over slots j, in this order, of routing[t, j] * FFN of expert index[t, j] (x[t]). All of it in float32,
// from x widened (exact) to the sum, which is rounded to x's dtype once: a token's bits do not depend on other tokens
// (with int8 activations as far as sparse_ffn's do not; a token that names an expert twice goes to it once).
struct ExpertsArgs {
  const void* x = nullptr;  // [tokens, hidden], x_dtype
  void* y = nullptr;        // [tokens, hidden], x_dtype
  DType x_dtype = DType::kF32;
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  const std::int64_t* index = nullptr;  // [tokens, slots]; `experts` itself is no expert and adds nothing
  const void* routing = nullptr;        // [tokens, slots], routing_dtype
  DType routing_dtype = DType::kF32;
  std::int64_t slots = 0;
  std::int64_t experts = 0;
};

// Long prompts go in slices of this many bytes of inputs and results in scratch (64 tokens at least), so that memory
// does not grow with the prompt: per token its input, a copy of it where tokens are gathered, and `slots` results.
constexpr std::int64_t kExpertBytes = 1 << 26;
constexpr std::int64_t expert_slice(std::int64_t slots, std::int64_t hidden) {
  return std::max<std::int64_t>(64, kExpertBytes / ((slots + 2) * hidden * static_cast<std::int64_t>(sizeof(float))));
}

// What one expert has to compute of a slice.
struct ExpertWork {
  std::int64_t expert = 0;
  std::int64_t tokens = 0;            // 1 or more
  const std::int64_t* ids = nullptr;  // [tokens] of the slice, ascending, each once
  const float* x = nullptr;           // [all tokens of the slice, hidden]
  float* y = nullptr;                 // [tokens, hidden]
  std::int64_t hidden = 0;
};

// `layer`, which is to compute `work`, with its input, output and number of tokens. The input may be gathered in this
// thread's scratch: valid until the next call.
FfnArgs of_expert(FfnArgs layer, const ExpertWork& work);

// Whoever computes experts.
class ExpertLayers {
 public:
  virtual ~ExpertLayers() = default;
  // Everything that is going to be computed of a slice, in this order, before the first of it.
  virtual void announce(const ExpertWork* /*works*/, std::int64_t /*count*/, const ParallelFor& /*parallel*/) {}
  // Returns "" or what went wrong.
  virtual std::string compute(const ExpertWork& work, const ParallelFor& parallel) = 0;
};

// Expert after expert, ascending. Returns "" or what went wrong: an index out of range, before anything is computed, or
// what `layers` said; y means nothing then.
std::string mix_experts(const ExpertsArgs& args, ExpertLayers& layers, const ParallelFor& parallel);

// Experts of equal sizes and settings: expert 0, behind whose tensors those of the others lie.
struct ExpertStack {
  // But for x, y and tokens; over a store without neuron_rows. n_hot: as many as `first`, which others compute.
  FfnArgs layer;
  Predictor predictor;                 // but for its cut; has rows for all neurons
  const double* cuts = nullptr;        // [experts]: the predictors' thresholds, or margins; not for kind kNone
  const double* thresholds = nullptr;  // [experts]: the layers'; null: `layer` has that of all
};

// What expert `work.expert` has to compute, as of_expert.
FfnArgs layer_of(const ExpertStack& stack, const ExpertWork& work);
Predictor predictor_of(const ExpertStack& stack, std::int64_t expert);

std::string experts_ffn(const ExpertsArgs& args, const ExpertStack& stack, const ParallelFor& parallel);

// A router that is one linear layer: a token's experts are the `chosen` with the highest scores. Scores are
// weights x + bias, and where there is a `correction` the sigmoid of that + correction.
struct Router {
  const void* weights = nullptr;      // [experts, hidden], dtype
  DType dtype = DType::kF32;          // a float type
  const float* bias = nullptr;        // [experts] or null
  const float* correction = nullptr;  // [experts] or null
  std::int64_t experts = 0, hidden = 0;
  std::int64_t chosen = 0;  // 1 to experts
};

// chosen_TK[t * chosen + j] = the experts of token t, the highest score first; of equal ones the first expert.
void route(const Router& router, const float* x_TH, std::int64_t tokens, std::int64_t* chosen_TK);

// How often a mixture's early routing is right. Any thread.
class GuessRecord {
 public:
  // Experts that are guessed for the next call.
  void guess(std::vector<std::int64_t> experts);
  // What was to be guessed: [pairs], `experts` itself is none.
  void see(const std::int64_t* index, std::int64_t pairs, std::int64_t experts);
  // Of late at least half of what was wanted had been guessed: else reads would be for nothing. At first it does.
  bool pays() const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::int64_t> guessed_;  // empty: nothing
  double right_ = 1;                   // share, of some 20 calls
};

// A mixture that is going to be computed after another one of the same store.
struct NextExperts {
  Router router;
  GuessRecord* record = nullptr;  // null: guesses are always read
  ExpertStack stack;              // of its layer no more than sizes
  std::int64_t first_layer = 0;
};

// Expert e is layer first_layer + e of the store: the same bits, but where sparse_ffn computes prompts by tiles and
// where OffloadOptions::drop_experts leaves some out, which add nothing; other weights stay as they are. Of a
// few tokens `next`, if any, is routed early, by the input of this mixture, and what its experts are likely to want
// begins to be read; `record`, if any, has what was guessed of this one. To `stats`, if any, is added what its calls of
// the store did.
std::string stored_experts(const ExpertsArgs& args, const ExpertStack& stack, Offload& store, std::int64_t first_layer,
                           const ParallelFor& parallel, CallStats* stats = nullptr, const NextExperts* next = nullptr,
                           GuessRecord* record = nullptr);

}  // namespace pi2
