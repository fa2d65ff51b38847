#include "ffn/firing.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <new>
#include <utility>

namespace pi2 {

std::atomic<std::int64_t> firing_watched{0};

// Counters; one call at a time uses them.
struct FiringLane {
  bool busy = false;
  std::int64_t readers = 0;           // waiting readers: no further call takes the lane
  std::int64_t pending = 0;           // upper bound of every narrow counter
  std::vector<std::uint16_t> narrow;  // [1 + sizes, neurons]: tokens, and groups of each size
  std::vector<std::int64_t> wide;
  std::int64_t tokens = 0;
  std::vector<std::int64_t> groups;  // [sizes]

  void empty() {
    for (std::size_t i = 0; i < narrow.size(); ++i) wide[i] += narrow[i];
    std::fill(narrow.begin(), narrow.end(), std::uint16_t{0});
    pending = 0;
  }
};

// A watched layer. Concurrent calls have lanes of their own, so that none waits for another.
struct FiringLayer {
  const WatchedLayer about;
  const std::vector<std::int64_t> sizes;
  std::mutex mutex;
  std::condition_variable idle;  // a lane that a reader waits for is free
  std::vector<std::unique_ptr<FiringLane>> lanes;

  FiringLayer(const WatchedLayer& layer, const std::vector<std::int64_t>& group_sizes)
      : about(layer), sizes(group_sizes) {}

  FiringLane* take() {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& lane : lanes) {
      if (lane->busy || lane->readers > 0) continue;
      lane->busy = true;
      return lane.get();
    }
    auto made = std::make_unique<FiringLane>();
    const std::size_t counters = (1 + sizes.size()) * static_cast<std::size_t>(about.neurons);
    made->narrow.resize(counters);
    made->wide.resize(counters);
    made->groups.resize(sizes.size());
    made->busy = true;
    lanes.push_back(std::move(made));
    return lanes.back().get();
  }
};

namespace {

constexpr std::int64_t kMostPending = 65535;

using Key = std::pair<const void*, std::int64_t>;

struct Registry {
  std::mutex mutex;
  std::map<Key, std::shared_ptr<FiringLayer>> layers;
};

Registry& registry() {
  static auto* const instance = new Registry();  // never destroyed: threads may still run
  return *instance;
}

Key key_of(const WatchedLayer& layer) { return {layer.owner, layer.layer}; }

}  // namespace

void FiringCall::begin(const FfnArgs& args) {
  const Key key = args.owner != nullptr ? Key{args.owner, args.layer} : Key{args.neuron_rows, -1};
  {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    const auto found = r.layers.find(key);
    if (found == r.layers.end() || found->second->about.neurons != args.neurons) return;
    layer_ = found->second;
  }
  try {
    lane_ = layer_->take();
  } catch (const std::bad_alloc&) {  // counting must not fail the call
    return;
  }
  tokens_ = args.tokens;
  counters_.cut = layer_->about.cut;
  counters_.fired = lane_->narrow.data();
  counters_.sizes = 0;
  const std::vector<std::int64_t>& sizes = layer_->sizes;
  if (sizes.empty() || tokens_ > sizes.back() || args.piece) return;
  for (const std::int64_t size : sizes) {
    if (size > tokens_) break;
    const int k = counters_.sizes++;
    counters_.size[k] = size;
    counters_.grouped[k] = counters_.fired + (k + 1) * args.neurons;
    counters_.begins[k] = 0;
    for (std::int64_t t = 0; t + size <= tokens_; t += size) counters_.begins[k] |= std::uint64_t{1} << t;
  }
}

void FiringCall::make_room(std::int64_t tokens) {
  if (lane_->pending + tokens > kMostPending) lane_->empty();
  lane_->pending += tokens;
}

void FiringCall::end() {
  const std::lock_guard<std::mutex> lock(layer_->mutex);
  lane_->tokens += tokens_;
  for (int k = 0; k < counters_.sizes; ++k) lane_->groups[static_cast<std::size_t>(k)] += tokens_ / counters_.size[k];
  lane_->busy = false;
  if (lane_->readers > 0) layer_->idle.notify_all();
}

struct FiringWatch::State {
  std::vector<std::shared_ptr<FiringLayer>> layers;
};

FiringWatch::FiringWatch(std::unique_ptr<State> state) : state_(std::move(state)) {}

std::unique_ptr<FiringWatch> FiringWatch::start(const std::vector<WatchedLayer>& layers,
                                                const std::vector<std::int64_t>& sizes, std::string* problem) {
  std::int64_t before = 1;
  std::string found;
  bool good = static_cast<std::int64_t>(sizes.size()) <= kMostSizes;
  for (const std::int64_t size : sizes) {
    good = good && size > before && size <= kMostGroup;
    found += (found.empty() ? "" : ", ") + std::to_string(size);
    before = size;
  }
  if (!good) {
    *problem = "sizes: expected at most " + std::to_string(kMostSizes) + ", ascending from 2 to " +
               std::to_string(kMostGroup) + ", found " + found;
    return nullptr;
  }
  auto state = std::make_unique<State>();
  for (const WatchedLayer& layer : layers) state->layers.push_back(std::make_shared<FiringLayer>(layer, sizes));
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  for (std::size_t i = 0; i < state->layers.size(); ++i) {
    if (r.layers.emplace(key_of(layers[i]), state->layers[i]).second) continue;
    for (std::size_t j = 0; j < i; ++j) r.layers.erase(key_of(layers[j]));
    *problem = "layer " + std::to_string(i) + " is watched already";
    return nullptr;
  }
  firing_watched.fetch_add(static_cast<std::int64_t>(layers.size()), std::memory_order_relaxed);
  return std::unique_ptr<FiringWatch>(new FiringWatch(std::move(state)));
}

FiringWatch::~FiringWatch() {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  for (const auto& layer : state_->layers) r.layers.erase(key_of(layer->about));
  firing_watched.fetch_sub(static_cast<std::int64_t>(state_->layers.size()), std::memory_order_relaxed);
}

FiringCounts FiringWatch::read(std::int64_t number, bool reset) {
  FiringLayer& layer = *state_->layers[static_cast<std::size_t>(number)];
  const auto neurons = static_cast<std::size_t>(layer.about.neurons);
  FiringCounts sum;
  sum.fired.resize(neurons);
  sum.groups.resize(layer.sizes.size());
  sum.grouped.resize(layer.sizes.size() * neurons);
  std::unique_lock<std::mutex> lock(layer.mutex);
  for (std::size_t i = 0; i < layer.lanes.size(); ++i) {
    FiringLane& lane = *layer.lanes[i];
    ++lane.readers;
    layer.idle.wait(lock, [&] { return !lane.busy; });
    --lane.readers;
    lane.empty();
    sum.tokens += lane.tokens;
    for (std::size_t n = 0; n < neurons; ++n) sum.fired[n] += lane.wide[n];
    for (std::size_t n = 0; n < sum.grouped.size(); ++n) sum.grouped[n] += lane.wide[neurons + n];
    for (std::size_t k = 0; k < sum.groups.size(); ++k) sum.groups[k] += lane.groups[k];
    if (!reset) continue;
    lane.tokens = 0;
    std::fill(lane.wide.begin(), lane.wide.end(), 0);
    std::fill(lane.groups.begin(), lane.groups.end(), 0);
  }
  return sum;
}

std::int64_t FiringWatch::layers() const { return static_cast<std::int64_t>(state_->layers.size()); }

std::int64_t FiringWatch::tokens() const {
  std::int64_t sum = 0;
  for (const auto& layer : state_->layers) {
    const std::lock_guard<std::mutex> lock(layer->mutex);
    for (const auto& lane : layer->lanes) sum += lane->tokens;
  }
  return sum;
}

}  // namespace pi2
