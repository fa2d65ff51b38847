// Mixtures of experts whose neurons are in a store.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/convert.h"
#include "pi2/experts.h"
#include "pi2/linear.h"
#include "pi2/offload.h"

namespace pi2 {
namespace {

const std::string kReading = "reading the neuron store: ";

// Early routing: what the next mixture is likely to want, by its own router and predictors, of the input of this one.
class Guess {
 public:
  Guess(const NextExperts& next, Offload& store) : next_(next), store_(store) {}

  // Of x [tokens, hidden].
  void make(const float* x_TH, std::int64_t tokens, const ParallelFor& parallel) {
    const Router& router = next_.router;
    std::vector<std::int64_t> chosen_TK(static_cast<std::size_t>(tokens * router.chosen));
    route(router, x_TH, tokens, chosen_TK.data());
    if (next_.record != nullptr) {
      next_.record->guess(chosen_TK);
      if (!next_.record->pays()) return;
    }
    for (std::int64_t e = 0; e < router.experts; ++e) {
      std::vector<std::int64_t> ids;
      for (std::int64_t t = 0; t < tokens; ++t) {
        const auto first = chosen_TK.begin() + t * router.chosen;
        if (std::find(first, first + router.chosen, e) != first + router.chosen) ids.push_back(t);
      }
      if (!ids.empty()) add(e, ids, x_TH, parallel);
    }
  }

  // Begins to read it.
  void read(CallStats* stats) const {
    for (const Expert& one : experts_)
      store_.prefetch(next_.first_layer + one.expert, 0, one.mask.empty() ? nullptr : one.mask.data(), one.tokens,
                      stats);
  }

 private:
  struct Expert {
    std::int64_t expert, tokens;
    std::vector<std::uint8_t> mask;  // [tokens, neurons]; empty: all of its neurons
  };

  void add(std::int64_t expert, const std::vector<std::int64_t>& ids, const float* x_TH, const ParallelFor& parallel) {
    const ExpertWork work{
        expert, static_cast<std::int64_t>(ids.size()), ids.data(), x_TH, nullptr, next_.router.hidden};
    const Predictor predictor = predictor_of(next_.stack, work);
    if (predictor.kind == Predictor::Kind::kNone && store_.gates_apart(next_.first_layer + expert)) return;
    experts_.push_back({expert, work.tokens, {}});
    if (predictor.kind == Predictor::Kind::kNone) return;
    Expert& one = experts_.back();
    const FfnArgs layer = of_expert(next_.stack.layer, work);
    one.mask.resize(static_cast<std::size_t>(one.tokens * layer.neurons));
    predict(predictor, layer, one.mask.data(), parallel);
  }

  const NextExperts& next_;
  Offload& store_;
  std::vector<Expert> experts_;
};

class InStore : public ExpertLayers {
 public:
  InStore(const ExpertsArgs& args, const ExpertStack& stack, Offload& store, std::int64_t first_layer, CallStats* stats,
          Guess* guess, std::function<void()> then)
      : args_(args),
        stack_(stack),
        store_(store),
        first_layer_(first_layer),
        stats_(stats),
        guess_(guess),
        then_(std::move(then)) {}

  // While decoding: what all experts want is predicted before the first of them is computed, so that reads for the
  // others are under way meanwhile. A prompt's experts want most of their neurons: one by one.
  void announce(const ExpertWork* works, std::int64_t count, const ParallelFor& parallel) override {
    announced_.clear();
    next_ = asked_ = 0;
    left_ = 0;
    works_ = works;
    gates_.assign(static_cast<std::size_t>(count), nullptr);
    std::int64_t pairs = 0;
    for (std::int64_t i = 0; i < count; ++i) pairs += works[i].tokens;
    if (pairs > kMostAnnounced) return;
    ask_for_gates(kGateBuffers);
    const std::int64_t cold = stack_.layer.neurons - stack_.layer.n_hot;
    masks_.resize(static_cast<std::size_t>(pairs * cold));
    std::uint8_t* mask = masks_.data();
    for (std::size_t i = 0; i < gates_.size(); ++i) {
      const Predictor::Kind kind = predictor_for(i).kind;
      // A prompt computes every gate with the layer; see predicted_ffn.
      const bool predicted =
          kind != Predictor::Kind::kNone && (kind != Predictor::Kind::kGate || works[i].tokens < kGemmTokens);
      announced_.push_back({works[i], i, predicted ? mask : nullptr});
      if (predicted) mask += works[i].tokens * cold;
    }
    // Before anything is read for this call, which might take the place of what these have there.
    if (store_.drop_experts() > 0 && args_.tokens < kStreamFrom)
      for (Announced& one : announced_) one.left_out = is_light(one.work) && is_missing(&one, parallel);
    for (Announced& one : announced_) {
      if (one.left_out) continue;
      ++left_;
      predict_once(&one, parallel);
      const bool later = one.mask == nullptr && reads_gates(one.work) && one.work.tokens < kGemmTokens;
      if (!later)
        store_.prefetch(first_layer_ + one.work.expert, stack_.layer.n_hot, one.mask, one.work.tokens, stats_);
    }
    if (guess_ != nullptr && count > 0) guess_->make(works[0].x, args_.tokens, parallel);
  }

  std::string compute(const ExpertWork& work, const ParallelFor& parallel) override {
    const std::size_t i = next_++;
    const Announced* const one = announced_.empty() ? nullptr : &announced_[i];
    if (one != nullptr && one->left_out) {
      std::fill(work.y, work.y + work.tokens * work.hidden, 0.0f);
      return "";
    }
    ask_for_gates(i + (one == nullptr ? 2 : kGateBuffers));
    const StoredGates gates = std::move(gates_[i]);  // until the expert is computed
    FfnArgs layer = layer_of(stack_, work);
    if (gates != nullptr) {
      std::string problem;
      layer.gate_rows = store_.gates_there(gates, &problem);
      if (!problem.empty()) return kReading + problem;
    }
    Predictor predictor = predictor_of(stack_, work);
    if (one != nullptr && one->mask != nullptr) {
      layer.active = one->mask;
      layer.all_fire = gates != nullptr || predictor.kind == Predictor::Kind::kGate;
      if (predictor.kind == Predictor::Kind::kGate && store_.gates_apart(first_layer_ + work.expert))
        layer.gate_rows = static_cast<const char*>(predictor.gate_rows);
      predictor = Predictor();
    }
    std::function<void()> then;
    // Own reads first: what the last expert wants has been asked for then.
    if (--left_ == 0 && (guess_ != nullptr || then_))
      then = [this] {
        if (guess_ != nullptr) guess_->read(stats_);
        if (then_) then_();
      };
    const std::string problem = store_.ffn(first_layer_ + work.expert, predictor, layer, parallel, then, stats_);
    return problem.empty() ? problem : kReading + problem;
  }

 private:
  static constexpr std::int64_t kMostAnnounced = 64;  // pairs of a token and an expert

  struct Announced {
    ExpertWork work;
    std::size_t number = 0;
    std::uint8_t* mask = nullptr;  // [tokens, cold neurons] that are wanted; null: all of them
    bool predicted = false, left_out = false;
  };

  // Whether the expert's gates lie apart in the store and no predictor does without them.
  bool reads_gates(const ExpertWork& work) const {
    return store_.gates_apart(first_layer_ + work.expert) && predictor_of(stack_, work).kind == Predictor::Kind::kNone;
  }

  // Begins to read those of the works before `end`.
  void ask_for_gates(std::size_t end) {
    for (; asked_ < std::min(end, gates_.size()); ++asked_)
      if (reads_gates(works_[asked_]))
        gates_[asked_] = store_.ask_for_gates(first_layer_ + works_[asked_].expert, stats_);
  }

  // The predictor of a work, which may be gates that are being read.
  Predictor predictor_for(std::size_t i) const {
    Predictor made = predictor_of(stack_, works_[i]);
    if (gates_[i] != nullptr) made.kind = Predictor::Kind::kGate;
    return made;
  }

  void predict_once(Announced* one, const ParallelFor& parallel) const {
    if (one->mask == nullptr || one->predicted) return;
    Predictor predictor = predictor_for(one->number);
    if (gates_[one->number] != nullptr) {
      std::string problem;  // compute() returns it
      predictor.gate_rows = store_.gates_there(gates_[one->number], &problem);
      if (!problem.empty()) {
        one->mask = nullptr;
        return;
      }
    }
    predict(predictor, layer_of(stack_, one->work), one->mask, parallel);
    one->predicted = true;
  }

  // Whether each of the expert's tokens gives it less than the share below which experts are left out, and another one
  // of its choices more (of equal ones the first counts as that).
  bool is_light(const ExpertWork& work) const {
    for (std::int64_t i = 0; i < work.tokens; ++i) {
      const std::int64_t first = work.ids[i] * args_.slots;
      float all = 0, own = 0, most = -std::numeric_limits<float>::infinity();
      std::int64_t heaviest = work.expert;
      for (std::int64_t j = first; j < first + args_.slots; ++j) {
        const float weight = load_float(args_.routing, args_.routing_dtype, j);
        all += weight;
        if (args_.index[j] == work.expert) own += weight;
        if (weight > most) heaviest = args_.index[j];
        most = std::max(most, weight);
      }
      if (!(own < static_cast<float>(store_.drop_experts()) * all) || heaviest == work.expert) return false;
    }
    return true;
  }

  bool is_missing(Announced* one, const ParallelFor& parallel) const {
    predict_once(one, parallel);
    const ExpertWork& work = one->work;
    if (!store_.mostly_missing(first_layer_ + work.expert, stack_.layer.n_hot, one->mask, work.tokens)) return false;
    store_.leave_out_experts(work.tokens);
    return true;
  }

  const ExpertsArgs& args_;
  const ExpertStack& stack_;
  Offload& store_;
  std::int64_t first_layer_;
  CallStats* stats_;
  Guess* guess_;  // null: none
  const std::function<void()> then_;
  std::int64_t left_ = 0;  // experts to compute
  const ExpertWork* works_ = nullptr;
  std::vector<StoredGates> gates_;    // of the works that read theirs
  std::size_t asked_ = 0;             // works before it have asked for theirs
  std::vector<std::uint8_t> masks_;   // of all works, in their order
  std::vector<Announced> announced_;  // empty: too many
  std::size_t next_ = 0;
};

}  // namespace

void GuessRecord::guess(std::vector<std::int64_t> experts) {
  const std::lock_guard<std::mutex> lock(mutex_);
  guessed_ = std::move(experts);
}

void GuessRecord::see(const std::int64_t* index, std::int64_t pairs, std::int64_t experts) {
  constexpr double kNew = 0.05;  // how much a call counts
  const std::lock_guard<std::mutex> lock(mutex_);
  std::int64_t wanted = 0, found = 0;
  for (std::int64_t i = 0; i < pairs; ++i) {
    if (index[i] == experts) continue;
    ++wanted;
    found += std::find(guessed_.begin(), guessed_.end(), index[i]) != guessed_.end();
  }
  if (wanted > 0 && !guessed_.empty())
    right_ += kNew * (static_cast<double>(found) / static_cast<double>(wanted) - right_);
  guessed_.clear();
}

bool GuessRecord::pays() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return right_ >= 0.5;
}

std::string stored_experts(const ExpertsArgs& args, const ExpertStack& stack, Offload& store, std::int64_t first_layer,
                           const ParallelFor& parallel, CallStats* stats, const NextExperts* next, GuessRecord* record,
                           const std::function<void()>& then) {
  if (record != nullptr) record->see(args.index, args.tokens * args.slots, args.experts);
  const bool early = next != nullptr && args.tokens <= kMostLookahead;
  std::optional<Guess> guess;
  if (early) guess.emplace(*next, store);
  InStore layers(args, stack, store, first_layer, stats, early ? &*guess : nullptr, then);
  return mix_experts(args, layers, parallel);
}

}  // namespace pi2
