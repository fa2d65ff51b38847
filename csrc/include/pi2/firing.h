// Which neurons of watched layers fire while they are used: for statistics of what a model really does.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace pi2 {

// One layer: of neurons in memory these and -1; of a store its Offload and the layer's number there.
struct WatchedLayer {
  const void* owner = nullptr;
  std::int64_t layer = -1;
  std::int64_t neurons = 0;
  // A neuron fires for a token if it is computed, contributes, and |act(gate)| > cut (NaN is); of layers without a
  // gate, or with an activation on up as well, |h| > cut.
  float cut = 0;
};

constexpr std::int64_t kMostGroup = 64;  // tokens
constexpr std::int64_t kMostSizes = 16;  // of groups

// Of one layer, since the beginning or the last reset.
struct FiringCounts {
  std::int64_t tokens = 0;
  std::vector<std::int64_t> fired;    // [neurons] tokens
  std::vector<std::int64_t> groups;   // [sizes]
  std::vector<std::int64_t> grouped;  // [sizes, neurons] groups in which the neuron fired for at least one token
};

// Counts from its making to its end. Any thread, also while layers are computed: results and their bits are the same.
//
// A call of t tokens, at most the largest of `sizes`, is a decoding step of t sequences: of size s it has t / s groups,
// tokens 0 to s - 1, s to 2s - 1 and so on. Calls of more tokens are prompts, which have tokens and no groups. What is
// not computed here (FfnArgs::first, or what a predictor left out) does not fire; a call whose reading failed counts as
// far as it came.
class FiringWatch {
 public:
  // `sizes`: from 2 to kMostGroup, ascending, kMostSizes at most. Null and a reason: others, or a layer is watched
  // already.
  static std::unique_ptr<FiringWatch> start(const std::vector<WatchedLayer>& layers,
                                            const std::vector<std::int64_t>& sizes, std::string* problem);
  ~FiringWatch();

  // Waits for calls of this layer that are under way.
  FiringCounts read(std::int64_t layer, bool reset);
  std::int64_t layers() const;
  // Of all layers; the calls that have ended.
  std::int64_t tokens() const;

 private:
  struct State;
  explicit FiringWatch(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace pi2
