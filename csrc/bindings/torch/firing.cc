// torch.ops.pi2.firing_*: count which neurons fire while a model is used; see torch_pi2.observe.watch.
#include "pi2/firing.h"

#include <map>
#include <mutex>

#include "bindings/torch/ffn.h"
#include "bindings/torch/offload.h"

namespace pi2::binding {
namespace {

// A watch, and the tensors and stores of its layers: they are kept alive while it counts, so that their addresses are
// not reused.
struct Watched {
  std::unique_ptr<FiringWatch> firing;
  std::vector<Tensor> neuron_rows;
  std::shared_ptr<Offload> store;
};

std::mutex watches_mutex;
std::map<int64_t, std::shared_ptr<Watched>>& watches() {
  static auto* const all = new std::map<int64_t, std::shared_ptr<Watched>>();  // never destroyed: threads may still run
  return *all;
}

std::shared_ptr<Watched> watch_of(int64_t number) {
  const std::lock_guard<std::mutex> lock(watches_mutex);
  const auto found = watches().find(number);
  STD_TORCH_CHECK(found != watches().end(), "pi2: watch: expected one under way, found number ", number,
                  ", which has ended or never was. Start another.");
  return found->second;
}

// Returns the watch's number; 0: one of the layers is watched already.
int64_t begin(const std::shared_ptr<Watched>& watch, const std::vector<WatchedLayer>& layers,
              const std::vector<int64_t>& sizes) {
  std::string problem;
  watch->firing = FiringWatch::start(layers, sizes, &problem);
  if (watch->firing == nullptr) {
    STD_TORCH_CHECK(problem.rfind("sizes", 0) != 0, "pi2: ", problem, ". Choose other batch sizes.");
    return 0;
  }
  const std::lock_guard<std::mutex> lock(watches_mutex);
  static int64_t next = 1;
  watches()[next] = watch;
  return next++;
}

void check_cuts(const std::vector<double>& cuts, size_t layers) {
  STD_TORCH_CHECK(cuts.size() == layers, "pi2: cuts: expected ", layers, ", one for each layer, found ", cuts.size(),
                  ". See torch_pi2.observe.watch.");
  for (const double cut : cuts)
    STD_TORCH_CHECK(cut >= 0, "pi2: cuts: expected 0 or more, found ", cut, ". Check the thresholds.");
}

int64_t firing_start(std::vector<Tensor> neuron_rows, std::vector<double> cuts, std::vector<int64_t> sizes) {
  check_cuts(cuts, neuron_rows.size());
  std::vector<WatchedLayer> layers;
  for (size_t i = 0; i < neuron_rows.size(); ++i) {
    check_plain(neuron_rows[i], "neuron_rows");
    STD_TORCH_CHECK((neuron_rows[i].dim() == 3 || neuron_rows[i].dim() == 2) && neuron_rows[i].numel() > 0 &&
                        (neuron_rows[i].is_contiguous() || apart(neuron_rows[i]) != 0),
                    "pi2: neuron_rows: expected contiguous [neurons, rows, hidden] or [neurons, bytes], found ",
                    shape_of(neuron_rows[i]), ". Pass those that the layer is called with.");
    layers.push_back({neuron_rows[i].const_data_ptr(), -1, neuron_rows[i].size(0), static_cast<float>(cuts[i])});
  }
  const auto watch = std::make_shared<Watched>();
  watch->neuron_rows = neuron_rows;
  return begin(watch, layers, sizes);
}

int64_t firing_start_stored(int64_t store, std::vector<int64_t> layers, std::vector<double> cuts,
                            std::vector<int64_t> sizes) {
  check_cuts(cuts, layers.size());
  const auto watch = std::make_shared<Watched>();
  watch->store = store_of(store);
  std::vector<WatchedLayer> watched;
  for (size_t i = 0; i < layers.size(); ++i) {
    const int64_t layer = layers[i], count = watch->store->layers();
    STD_TORCH_CHECK(layer >= 0 && layer < count, "pi2: layer: expected 0 to ", count - 1, ", found ", layer,
                    ". The store is of another model.");
    watched.push_back({watch->store.get(), layer, watch->store->shape(layer).neurons, static_cast<float>(cuts[i])});
  }
  return begin(watch, watched, sizes);
}

// int64 [1 + sizes, 1 + neurons]. Row 0: tokens, then for each neuron the tokens for which it fired. A further row per
// size: groups, then for each neuron the groups in which it fired.
Tensor firing_read(int64_t watch, int64_t layer, bool reset) {
  const std::shared_ptr<Watched> watched = watch_of(watch);
  const int64_t layers = watched->firing->layers();
  STD_TORCH_CHECK(layer >= 0 && layer < layers, "pi2: layer: expected 0 to ", layers - 1, ", found ", layer,
                  ". Count them from the first that the watch was given.");
  const FiringCounts counts = watched->firing->read(layer, reset);
  const auto neurons = static_cast<int64_t>(counts.fired.size()), sizes = static_cast<int64_t>(counts.groups.size());
  Tensor out = torch::stable::empty({1 + sizes, 1 + neurons}, ScalarType::Long);
  auto* values = static_cast<int64_t*>(out.mutable_data_ptr());
  *values++ = counts.tokens;
  values = std::copy(counts.fired.begin(), counts.fired.end(), values);
  for (int64_t k = 0; k < sizes; ++k) {
    *values++ = counts.groups[static_cast<size_t>(k)];
    values = std::copy_n(counts.grouped.begin() + k * neurons, neurons, values);
  }
  return out;
}

int64_t firing_tokens(int64_t watch) { return watch_of(watch)->firing->tokens(); }

bool firing_stop(int64_t watch) {
  std::shared_ptr<Watched> last;  // destroyed after the lock is given back: a store may wait for reads
  const std::lock_guard<std::mutex> lock(watches_mutex);
  const auto found = watches().find(watch);
  if (found == watches().end()) return false;
  last = std::move(found->second);
  watches().erase(found);
  return true;
}

}  // namespace
}  // namespace pi2::binding

STABLE_TORCH_LIBRARY_FRAGMENT(pi2, m) {
  m.def("firing_start(Tensor[] neuron_rows, float[] cuts, int[] sizes) -> int");
  m.def("firing_start_stored(int store, int[] layers, float[] cuts, int[] sizes) -> int");
  m.def("firing_read(int watch, int layer, bool reset) -> Tensor");
  m.def("firing_tokens(int watch) -> int");
  m.def("firing_stop(int watch) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CompositeExplicitAutograd, m) {
  m.impl("firing_start", TORCH_BOX(&pi2::binding::firing_start));
  m.impl("firing_start_stored", TORCH_BOX(&pi2::binding::firing_start_stored));
  m.impl("firing_read", TORCH_BOX(&pi2::binding::firing_read));
  m.impl("firing_tokens", TORCH_BOX(&pi2::binding::firing_tokens));
  m.impl("firing_stop", TORCH_BOX(&pi2::binding::firing_stop));
}
