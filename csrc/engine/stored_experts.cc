// Mixtures of experts whose neurons are in a store.
#include <cstdint>
#include <string>
#include <vector>

#include "pi2/experts.h"
#include "pi2/offload.h"

namespace pi2 {
namespace {

class InStore : public ExpertLayers {
 public:
  InStore(const ExpertStack& stack, Offload& store, std::int64_t first_layer, CallStats* stats)
      : stack_(stack), store_(store), first_layer_(first_layer), stats_(stats) {}

  // While decoding: what all experts want is predicted before the first of them is computed, so that reads for the
  // others are under way meanwhile. A prompt's experts want most of their neurons: one by one.
  void announce(const ExpertWork* works, std::int64_t count, const ParallelFor& parallel) override {
    masks_.clear();
    std::int64_t pairs = 0;
    for (std::int64_t i = 0; i < count; ++i) pairs += works[i].tokens;
    if (pairs > kMostAnnounced) return;
    const std::int64_t cold = stack_.layer.neurons - stack_.layer.n_hot;
    const bool predicted = stack_.predictor.kind != Predictor::Kind::kNone;
    if (predicted) masks_.resize(static_cast<std::size_t>(pairs * cold));
    std::uint8_t* mask = masks_.data();
    for (std::int64_t i = 0; i < count; ++i) {
      const FfnArgs layer = layer_of(stack_, works[i]);
      if (predicted) predict(predictor_of(stack_, works[i].expert), layer, mask, parallel);
      store_.prefetch(first_layer_ + works[i].expert, layer.n_hot, predicted ? mask : nullptr, works[i].tokens, stats_);
      mask += predicted ? works[i].tokens * cold : 0;
    }
    next_mask_ = 0;
  }

  std::string compute(const ExpertWork& work, const ParallelFor& parallel) override {
    FfnArgs layer = layer_of(stack_, work);
    Predictor predictor = predictor_of(stack_, work.expert);
    if (!masks_.empty()) {
      layer.active = masks_.data() + next_mask_;
      next_mask_ += static_cast<std::size_t>(work.tokens * (layer.neurons - layer.n_hot));
      predictor = Predictor();
    }
    const std::string problem = store_.ffn(first_layer_ + work.expert, predictor, layer, parallel, nullptr, stats_);
    return problem.empty() ? problem : "reading the neuron store: " + problem;
  }

 private:
  static constexpr std::int64_t kMostAnnounced = 64;  // pairs of a token and an expert

  const ExpertStack& stack_;
  Offload& store_;
  std::int64_t first_layer_;
  CallStats* stats_;
  std::vector<std::uint8_t> masks_;  // of all works, in their order; empty: none were made
  std::size_t next_mask_ = 0;
};

}  // namespace

std::string stored_experts(const ExpertsArgs& args, const ExpertStack& stack, Offload& store, std::int64_t first_layer,
                           const ParallelFor& parallel, CallStats* stats) {
  InStore layers(stack, store, first_layer, stats);
  return mix_experts(args, layers, parallel);
}

}  // namespace pi2
