// torch.ops.pi2.store_resize, store_arrange, store_prioritise, store_record, store_recorded: the cache of an open store
// and records of its accesses; replay*: the hits of other caches. See torch_pi2.observe.accesses and
// torch_pi2.observe.replay.
#include "pi2/replay.h"

#include <stdexcept>
#include <tuple>

#include "bindings/torch/offload.h"

namespace pi2::binding {
namespace {

template <class T>
Tensor tensor_of(const std::vector<T>& values, ScalarType dtype) {
  Tensor out = torch::stable::empty({static_cast<int64_t>(values.size())}, dtype);
  std::copy(values.begin(), values.end(), static_cast<T*>(out.mutable_data_ptr()));
  return out;
}

void check(const Tensor& tensor, ScalarType dtype, int64_t dims, const char* name, const char* expected) {
  check_plain(tensor, name);
  STD_TORCH_CHECK(tensor.scalar_type() == dtype && tensor.dim() == dims && tensor.is_contiguous(), "pi2: ", name,
                  ": expected contiguous ", expected, ", found ", shape_of(tensor),
                  tensor.scalar_type() == dtype ? "" : " of another dtype", ". See torch_pi2.observe.replay.");
}

// Returns "" or an error message.
std::string store_resize(int64_t store, int64_t cache_bytes, double hot_share) {
  return store_of(store)->resize(cache_bytes, hot_share);
}

// `cache_bytes` -1: keeps the size. Returns "" or an error message.
std::string store_arrange(int64_t store, std::vector<int64_t> resident, int64_t cache_bytes) {
  return store_of(store)->arrange(resident, cache_bytes);
}

// `values`: float32 [neurons] of the layer; none: of no layer, so that the policy decides.
std::string store_prioritise(int64_t store, int64_t layer, const MaybeTensor& values) {
  const std::shared_ptr<Offload> offload = store_of(store);
  STD_TORCH_CHECK(layer >= 0 && layer < offload->layers(), "pi2: layer: expected 0 to ", offload->layers() - 1,
                  ", found ", layer, ". The store is of another model.");
  if (!values) return offload->prioritise(layer, nullptr);
  check(*values, ScalarType::Float, 1, "values", "float32 [neurons]");
  STD_TORCH_CHECK(values->size(0) == offload->shape(layer).neurons, "pi2: values: expected ",
                  offload->shape(layer).neurons, ", one of each neuron, found ", values->size(0), ".");
  return offload->prioritise(layer, static_cast<const float*>(values->const_data_ptr()));
}

std::string store_record(int64_t store, int64_t most_bytes) { return store_of(store)->record_accesses(most_bytes); }

// Layers int32 [calls], streamed uint8 [calls], bits uint8 [bytes], and int64 [4]: wanted, hits, calls lost, whole.
std::tuple<Tensor, Tensor, Tensor, Tensor> store_recorded(int64_t store) {
  const Accesses a = store_of(store)->take_accesses();
  return {tensor_of(a.layers, ScalarType::Int), tensor_of(a.streamed, ScalarType::Byte),
          tensor_of(a.bits, ScalarType::Byte),
          tensor_of(std::vector<int64_t>{a.wanted, a.hits, a.lost, a.whole}, ScalarType::Long)};
}

// Calls `run` with the accesses and the layers. `about`: int64 [layers, 2], neurons and neurons per slot.
template <class Run>
auto with(const Tensor& layers, const Tensor& streamed, const Tensor& bits, const Tensor& about, const Run& run) {
  check(layers, ScalarType::Int, 1, "layers", "int32 [calls]");
  check(streamed, ScalarType::Byte, 1, "streamed", "uint8 [calls]");
  check(bits, ScalarType::Byte, 1, "bits", "uint8 [bytes]");
  check(about, ScalarType::Long, 2, "about", "int64 [layers, 2]");
  STD_TORCH_CHECK(
      layers.size(0) == streamed.size(0) && about.size(1) == 2,
      "pi2: accesses: expected as many calls in streamed as in layers, and two numbers of each layer, found ",
      streamed.size(0), " for ", layers.size(0), ", and ", about.size(1), ". Record them again.");
  const AccessView view{static_cast<const int32_t*>(layers.const_data_ptr()),
                        static_cast<const uint8_t*>(streamed.const_data_ptr()), layers.size(0),
                        static_cast<const uint8_t*>(bits.const_data_ptr()), bits.size(0)};
  std::vector<ReplayLayer> all;
  const auto* numbers = static_cast<const int64_t*>(about.const_data_ptr());
  for (int64_t l = 0; l < about.size(0); ++l) all.push_back({numbers[2 * l], numbers[2 * l + 1]});
  std::string wrong;
  try {
    return run(view, all);
  } catch (const std::invalid_argument& error) {
    wrong = error.what();
  }
  STD_TORCH_CHECK(false, "pi2: accesses: ", wrong, ". Record them again.");
}

bool replay_check(Tensor layers, Tensor streamed, Tensor bits, Tensor about) {
  return with(layers, streamed, bits, about, [](const AccessView& view, const std::vector<ReplayLayer>& all) {
    check_accesses(view, all);
    return true;
  });
}

void check_options(int64_t slots, double hot_share, int64_t window) {
  STD_TORCH_CHECK(slots >= 0 && hot_share >= 0 && hot_share <= 1 && window >= 0,
                  "pi2: replay: expected no negative numbers and a hot share of 0 to 1, found ", slots, " slots, ",
                  hot_share, " and a window of ", window, ". See torch_pi2.observe.replay.");
}

// int64 [layers, 3]: neurons wanted, hits, and missing slots of the file. Policy "optimal": the best possible.
Tensor replay(Tensor layers, Tensor streamed, Tensor bits, Tensor about, const Text& policy, int64_t slots,
              double hot_share, bool preload, int64_t window, std::vector<int64_t> fixed) {
  check_options(slots, hot_share, window);
  const ReplayOptions options = {policy, slots, hot_share, preload, window, fixed};
  return with(layers, streamed, bits, about, [&](const AccessView& view, const std::vector<ReplayLayer>& all) {
    const std::vector<ReplayCounts> counts =
        policy == "optimal" ? replay_optimal(view, all, options) : pi2::replay(view, all, options);
    Tensor out = torch::stable::empty({static_cast<int64_t>(counts.size()), 3}, ScalarType::Long);
    auto* values = static_cast<int64_t*>(out.mutable_data_ptr());
    for (const ReplayCounts& n : counts)
      for (const int64_t number : {n.wanted, n.hits, n.missed}) *values++ = number;
    return out;
  });
}

// int64 [2 N], [3 M] and [calls]: see ReplayWork.
std::tuple<Tensor, Tensor, Tensor> replay_work(Tensor layers, Tensor streamed, Tensor bits, Tensor about, int64_t slots,
                                               double hot_share, bool preload, std::vector<int64_t> fixed) {
  check_options(slots, hot_share, 0);
  const ReplayOptions options = {"static", slots, hot_share, preload, 0, fixed};
  return with(layers, streamed, bits, about, [&](const AccessView& view, const std::vector<ReplayLayer>& all) {
    const ReplayWork work = pi2::replay_work(view, all, options);
    return std::make_tuple(tensor_of(work.filled, ScalarType::Long), tensor_of(work.wanted, ScalarType::Long),
                           tensor_of(work.ends, ScalarType::Long));
  });
}

}  // namespace
}  // namespace pi2::binding

STABLE_TORCH_LIBRARY_FRAGMENT(pi2, m) {
  m.def("store_resize(int store, int cache_bytes, float hot_share) -> str");
  m.def("store_arrange(int store, int[] resident, int cache_bytes) -> str");
  m.def("store_prioritise(int store, int layer, Tensor? values) -> str");
  m.def("store_record(int store, int most_bytes) -> str");
  m.def("store_recorded(int store) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("replay_check(Tensor layers, Tensor streamed, Tensor bits, Tensor about) -> bool");
  m.def(
      "replay(Tensor layers, Tensor streamed, Tensor bits, Tensor about, str policy, int slots, float hot_share, "
      "bool preload, int window, int[] fixed=[]) -> Tensor");
  m.def(
      "replay_work(Tensor layers, Tensor streamed, Tensor bits, Tensor about, int slots, float hot_share, bool preload, "
      "int[] fixed=[]) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CompositeExplicitAutograd, m) {
  m.impl("store_resize", TORCH_BOX(&pi2::binding::store_resize));
  m.impl("store_arrange", TORCH_BOX(&pi2::binding::store_arrange));
  m.impl("store_prioritise", TORCH_BOX(&pi2::binding::store_prioritise));
  m.impl("store_record", TORCH_BOX(&pi2::binding::store_record));
  m.impl("store_recorded", TORCH_BOX(&pi2::binding::store_recorded));
  m.impl("replay_check", TORCH_BOX(&pi2::binding::replay_check));
  m.impl("replay", TORCH_BOX(&pi2::binding::replay));
  m.impl("replay_work", TORCH_BOX(&pi2::binding::replay_work));
}
