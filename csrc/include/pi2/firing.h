// Counts which neurons of watched layers fire while the model is used.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace pi2 {

// One layer. In memory: owner is the address of the neurons, layer -1. In a store: its Offload and the layer's number.
struct WatchedLayer {
  const void* owner = nullptr;
  std::int64_t layer = -1;
  std::int64_t neurons = 0;
  // A neuron fires for a token if it is computed, contributes, and |act(gate)| > cut (NaN counts as greater). Layers
  // without a gate, or with an activation on up as well: |h| > cut.
  float cut = 0;
};

constexpr std::int64_t kMostGroup = 64;  // tokens
constexpr std::int64_t kMostSizes = 16;  // of groups

// Counts of one layer since the start or the last reset.
struct FiringCounts {
  std::int64_t tokens = 0;
  std::vector<std::int64_t> fired;    // [neurons] tokens for which the neuron fired
  std::vector<std::int64_t> groups;   // [sizes]
  std::vector<std::int64_t> grouped;  // [sizes, neurons] groups in which the neuron fired for at least one token
};

// Counts from construction to destruction. Thread-safe, also while layers are computed; results keep their bits.
//
// A call of t tokens, at most the largest of `sizes`, counts as a decoding step of t sequences: it has t / s groups of
// size s, tokens 0 to s - 1, s to 2s - 1 and so on. Calls of more tokens count as prompts, without groups. Neurons that
// are not computed here (FfnArgs::first, or skipped by a predictor) do not fire. A call whose reads failed counts as
// far as it came.
class FiringWatch {
 public:
  // `sizes`: from 2 to kMostGroup, ascending, at most kMostSizes. Returns null and sets `problem` for other sizes, or
  // if a layer is watched already.
  static std::unique_ptr<FiringWatch> start(const std::vector<WatchedLayer>& layers,
                                            const std::vector<std::int64_t>& sizes, std::string* problem);
  ~FiringWatch();

  // Waits for running calls of this layer.
  FiringCounts read(std::int64_t layer, bool reset);
  std::int64_t layers() const;
  // Over all layers, counting calls that have ended.
  std::int64_t tokens() const;

 private:
  struct State;
  explicit FiringWatch(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace pi2
