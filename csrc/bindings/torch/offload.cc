// torch.ops.pi2.store_*: open stores, identified by number; stored_ffn: a layer over a store.
#include "bindings/torch/offload.h"

#include <map>
#include <memory>
#include <mutex>

#include "base/crc32c.h"
#include "bindings/torch/ffn.h"
#include "bindings/torch/predict.h"
#include "pi2/linear.h"

namespace pi2::binding {
namespace {

// The predictor that prefetches a layer's neurons from the input of the layer before.
struct Lookahead {
  std::vector<Tensor> tensors;  // the predictor points into these
  Predictor predictor;
  int64_t n_hot = 0;
};

// Neurons that a layer is likely to need, by the caller's choice.
struct Ahead {
  int64_t n_hot = 0, tokens = 0;
  std::vector<std::uint8_t> marks;  // [tokens, cold neurons]

  void read(Offload& offload, int64_t layer) const { offload.prefetch(layer, n_hot, marks.data(), tokens); }
};
using Aheads = std::map<int64_t, Ahead>;  // by layer

struct Open {
  std::shared_ptr<Offload> offload;
  std::map<int64_t, Aheads> ahead;                                 // by the layer whose next call begins to read them
  std::map<int64_t, std::shared_ptr<const Lookahead>> lookahead;   // by layer
  std::map<int64_t, std::shared_ptr<EarlyRouting>> early_routing;  // by the first layer of the mixture before
};

// Open stores. A call holds its store, so that it may be closed meanwhile.
std::mutex stores_mutex;
std::map<int64_t, Open>& stores() {
  static auto* const all = new std::map<int64_t, Open>();  // never destroyed: threads may still run
  return *all;
}

// Needs the lock.
Open& open_store(int64_t number) {
  const auto found = stores().find(number);
  STD_TORCH_CHECK(found != stores().end(), "pi2: store: expected an open one, found number ", number,
                  ", which is closed or never was. Load the model again.");
  return found->second;
}

}  // namespace

std::shared_ptr<Offload> store_of(int64_t number) {
  const std::lock_guard<std::mutex> lock(stores_mutex);
  return open_store(number).offload;
}

Guesses early_routing(int64_t number, int64_t layer) {
  const std::lock_guard<std::mutex> lock(stores_mutex);
  Guesses found;
  for (const auto& [at, early] : open_store(number).early_routing) {
    if (at == layer) found.next = early;
    if (found.own == nullptr && early->next.first_layer == layer) found.own = early;
  }
  return found;
}

std::function<void()> asked_behind(int64_t number, int64_t layer) {
  const std::lock_guard<std::mutex> lock(stores_mutex);
  Open& open = open_store(number);
  const auto found = open.ahead.find(layer);
  if (found == open.ahead.end()) return nullptr;
  auto all = std::make_shared<Aheads>(std::move(found->second));
  open.ahead.erase(found);
  return [offload = open.offload, all] {
    for (const auto& [later, one] : *all) one.read(*offload, later);
  };
}

void route_early(int64_t number, int64_t layer, std::shared_ptr<EarlyRouting> next) {
  const std::lock_guard<std::mutex> lock(stores_mutex);
  open_store(number).early_routing[layer] = std::move(next);
}

Predictor gate_in_memory(const FfnArgs& args, const std::vector<Tensor>& tensors, bool experts) {
  const size_t count = experts ? 2 : 1;
  STD_TORCH_CHECK(tensors.size() == count, "pi2: predictor: expected the gate rows alone",
                  experts ? " and their numbers" : "", " for kind gate, found ", tensors.size(),
                  " tensors. See torch_pi2.ops.ffn.stored_ffn.");
  const Tensor& rows = tensors[0];
  check_plain(rows, "gate rows");
  const bool quantised = is_quantized(args.w_dtype) || is_ggml(args.w_dtype);
  const int64_t width = quantised ? row_bytes(args.w_dtype, args.hidden) : args.hidden, dim = experts ? 3 : 2;
  const bool same = quantised ? rows.scalar_type() == ScalarType::Byte : float_dtype(rows, "gate rows") == args.w_dtype;
  STD_TORCH_CHECK(same && rows.dim() == dim && rows.size(dim - 2) == args.neurons && rows.size(dim - 1) == width &&
                      rows.is_contiguous(),
                  "pi2: gate rows: expected contiguous [", experts ? "experts, " : "", args.neurons, ", ", width,
                  "] in the format of the store's neurons, found ", shape_of(rows), same ? "" : " of another",
                  ". They are the first rows of the layer's neurons, in plan order.");
  Predictor made;
  made.kind = Predictor::Kind::kGate;
  made.gate_rows = rows.const_data_ptr();
  return made;
}

namespace {

int64_t store_open(const Text& path, int64_t cache_bytes, const Text& engine, const Text& policy, int64_t io_threads,
                   bool direct, bool verify, bool pipeline, int64_t window, int64_t in_flight, int64_t run_bytes,
                   int64_t gap_bytes, double hot_share, bool spin, std::vector<double> device, double miss_margin,
                   double drop_experts) {
  OffloadOptions options;
  options.cache_bytes = cache_bytes;
  options.engine = engine;
  options.policy = policy;
  options.io_threads = static_cast<int>(io_threads);
  options.direct = direct;
  options.verify = verify;
  options.pipeline = pipeline;
  options.window = window;
  options.in_flight = in_flight;
  options.run_bytes = run_bytes;
  options.gap_bytes = gap_bytes;
  options.hot_share = hot_share;
  options.spin = spin;
  options.device = device;
  options.miss_margin = miss_margin;
  options.drop_experts = drop_experts;
  std::string problem;
  std::shared_ptr<Offload> made = Offload::open(path, options, &problem);
  STD_TORCH_CHECK(made != nullptr, "pi2: store ", path, ": ", problem);
  const std::lock_guard<std::mutex> lock(stores_mutex);
  static int64_t next = 1;
  stores()[next].offload = made;
  return next++;
}

bool store_close(int64_t store) {
  Open last;  // destroyed after the lock is given back: it waits for reads
  const std::lock_guard<std::mutex> lock(stores_mutex);
  const auto found = stores().find(store);
  if (found == stores().end()) return false;
  last = std::move(found->second);
  stores().erase(found);
  return true;
}

// [layers, 5]: neurons, hidden size, rows per neuron, number of the dtype, hot neurons.
Tensor store_layers(int64_t store) {
  const std::shared_ptr<Offload> offload = store_of(store);
  Tensor out = torch::stable::empty({offload->layers(), 5}, ScalarType::Long);
  auto* values = static_cast<int64_t*>(out.mutable_data_ptr());
  for (int64_t l = 0; l < offload->layers(); ++l) {
    const FfnArgs shape = offload->shape(l);
    const int64_t numbers[] = {shape.neurons, shape.hidden, shape.rows, static_cast<int64_t>(shape.w_dtype),
                               shape.n_hot};
    for (const int64_t number : numbers) *values++ = number;
  }
  return out;
}

// Returns "" or an error message.
std::string store_preload(int64_t store) { return store_of(store)->preload(); }

// The first neurons of each layer are computed elsewhere: the cache is for the others.
bool store_leave_out(int64_t store, std::vector<int64_t> first) {
  const std::shared_ptr<Offload> offload = store_of(store);
  STD_TORCH_CHECK(static_cast<int64_t>(first.size()) == offload->layers(), "pi2: first: expected ", offload->layers(),
                  " numbers, one a layer, found ", first.size(), ".");
  for (int64_t l = 0; l < offload->layers(); ++l) {
    const int64_t neurons = offload->shape(l).neurons, found = first[static_cast<size_t>(l)];
    STD_TORCH_CHECK(found >= 0 && found <= neurons, "pi2: first of layer ", l, ": expected 0 to ", neurons, ", found ",
                    found, ".");
  }
  offload->leave_out(first);
  return true;
}

std::string store_describe(int64_t store) { return store_of(store)->describe(); }

// In the order of torch_pi2.layers.offloaded.STATISTICS.
Tensor store_stats(int64_t store, bool reset) {
  const OffloadStats s = store_of(store)->stats(reset);
  const int64_t all[] = {s.calls,   s.wanted,  s.hits,  s.reads,    s.bytes_read, s.evictions,   s.uncached,
                         s.wait_ns, s.busy_ns, s.io_ns, s.resident, s.slots,      s.cache_bytes, s.staging_bytes,
                         s.guessed, s.used,    s.late,  s.fixed,    s.arranging,  s.left_out,    s.experts_left_out};
  Tensor out = torch::stable::empty({static_cast<int64_t>(std::size(all))}, ScalarType::Long);
  std::copy(std::begin(all), std::end(all), static_cast<int64_t*>(out.mutable_data_ptr()));
  return out;
}

// Sets the predictor of `layer`, so that stored_ffn of the layer before can prefetch its neurons.
bool store_lookahead(int64_t store, int64_t layer, std::vector<Tensor> predictor, const Text& kind, double cut,
                     const Text& predictor_weights, bool predictor_int8_activations, int64_t n_hot) {
  const std::shared_ptr<Offload> offload = store_of(store);
  STD_TORCH_CHECK(layer > 0 && layer < offload->layers(), "pi2: layer: expected 1 to ", offload->layers() - 1,
                  ", found ", layer, ". The first layer has none before it.");
  FfnArgs args = offload->shape(layer);
  STD_TORCH_CHECK(args.hidden == offload->shape(layer - 1).hidden, "pi2: hidden size of layer ", layer, ": expected ",
                  offload->shape(layer - 1).hidden, ", as the layer before has, found ", args.hidden,
                  ". Leave look-ahead out.");
  STD_TORCH_CHECK(n_hot >= 0 && n_hot <= args.neurons, "pi2: n_hot: expected 0 to ", args.neurons, ", found ", n_hot,
                  ". Check the plan.");
  args.n_hot = n_hot;
  STD_TORCH_CHECK(kind != "mask",
                  "pi2: kind: expected a predictor that computes, found 'mask', which is of one call. "
                  "Leave look-ahead out.");
  const auto made = std::make_shared<Lookahead>();
  const Tensor x = torch::stable::empty({1, args.hidden}, ScalarType::Float);  // for the checks of its size
  made->predictor = any_predictor(x, args, predictor, kind, cut, predictor_weights, predictor_int8_activations);
  made->tensors = predictor;
  made->n_hot = n_hot;
  const std::lock_guard<std::mutex> lock(stores_mutex);
  open_store(store).lookahead[layer] = made;
  return true;
}

// Begins to read what `layer` is likely to need: at once, or with the next call of layer `after`, behind its own reads.
bool store_prefetch(int64_t store, int64_t layer, int64_t n_hot, const Tensor& active, int64_t after) {
  const std::shared_ptr<Offload> offload = store_of(store);
  STD_TORCH_CHECK(layer >= 0 && layer < offload->layers(), "pi2: layer: expected 0 to ", offload->layers() - 1,
                  ", found ", layer, ". The store is of another model.");
  STD_TORCH_CHECK(after >= -1 && after < offload->layers() && after != layer, "pi2: after: expected -1, or a layer of ",
                  "the store other than ", layer, ", found ", after, ". -1 reads at once.");
  const int64_t neurons = offload->shape(layer).neurons;
  STD_TORCH_CHECK(n_hot >= 0 && n_hot <= neurons, "pi2: n_hot: expected 0 to ", neurons, ", found ", n_hot,
                  ". Check the plan.");
  check_plain(active, "active");
  const int64_t cold = neurons - n_hot, columns = active.dim() > 0 ? active.size(-1) : 0;
  STD_TORCH_CHECK(active.scalar_type() == ScalarType::Bool && active.dim() > 0 && columns >= cold,
                  "pi2: active: expected bool [..., ", cold, " or more], found ", shape_of(active),
                  active.scalar_type() == ScalarType::Bool ? "" : " of another dtype",
                  ". Its last columns are those of cold neurons in plan order.");
  const Tensor rows = dense(active);
  Ahead made;
  made.n_hot = n_hot;
  made.tokens = columns > 0 ? active.numel() / columns : 0;
  const auto* row = static_cast<const uint8_t*>(rows.const_data_ptr()) + columns - cold;
  for (int64_t t = 0; t < made.tokens; ++t, row += columns) made.marks.insert(made.marks.end(), row, row + cold);
  if (made.tokens == 0) return true;
  if (after < 0) {
    made.read(*offload, layer);
    return true;
  }
  const std::lock_guard<std::mutex> lock(stores_mutex);
  open_store(store).ahead[after][layer] = std::move(made);
  return true;
}

// Prefetches for the layer after `layer`, by that layer's predictor on this layer's input: decoder blocks change the
// residual stream slowly. Predicts before the layer is computed; the reads are submitted after the layer's own.
std::function<void()> look_ahead(Offload& offload, const Lookahead* next, int64_t layer, const FfnArgs& args) {
  if (next == nullptr || args.tokens > kMostLookahead) return nullptr;
  FfnArgs after = offload.shape(layer);
  after.n_hot = next->n_hot;
  after.x = args.x;
  after.x_dtype = args.x_dtype;
  after.tokens = args.tokens;
  thread_local std::vector<std::uint8_t> mask;  // of the calling thread; other threads use it only while that waits
  mask.resize(static_cast<size_t>(args.tokens * (after.neurons - after.n_hot)));
  Predictor predictor = next->predictor;  // neurons that may be skipped are not worth a read
  predictor.lowrank.threshold += static_cast<float>(offload.miss_margin());
  if (!mask.empty()) predict(predictor, after, mask.data(), torch_threads());
  return [&offload, layer, n_hot = after.n_hot, tokens = args.tokens, marks = mask.data()] {
    offload.prefetch(layer, n_hot, marks, tokens);
  };
}

// With `parts`, the number of chunks, the result is float32 [parts, tokens, hidden]; see FfnArgs.
Tensor stored_ffn(const Tensor& x, int64_t store, int64_t layer, const MaybeTensor& bias_gate,
                  const MaybeTensor& bias_up, const MaybeTensor& bias_down, std::vector<Tensor> predictor,
                  const Text& kind, double cut, const Text& predictor_weights, bool predictor_int8_activations,
                  const Text& activation, bool activation_on_up, int64_t n_hot, double threshold, bool int8_activations,
                  int64_t first, const MaybeTensor& thresholds, int64_t parts) {
  std::shared_ptr<Offload> offload;
  std::shared_ptr<const Lookahead> next;
  {
    const std::lock_guard<std::mutex> lock(stores_mutex);
    Open& open = open_store(store);
    offload = open.offload;
    const auto found = open.lookahead.find(layer + 1);
    if (found != open.lookahead.end()) next = found->second;
  }
  STD_TORCH_CHECK(layer >= 0 && layer < offload->layers(), "pi2: layer: expected 0 to ", offload->layers() - 1,
                  ", found ", layer, ". The store is of another model.");
  check_plain(x, "x");
  FfnArgs args = offload->shape(layer);
  check_hidden(x, args.hidden);
  STD_TORCH_CHECK(n_hot >= 0 && n_hot <= args.neurons, "pi2: n_hot: expected 0 to ", args.neurons, ", found ", n_hot,
                  ". Check the plan.");
  args.n_hot = n_hot;
  STD_TORCH_CHECK(first >= 0 && first <= args.neurons, "pi2: first: expected 0 to ", args.neurons, ", found ", first,
                  ". Leave out neurons of this layer.");
  args.first = first;
  STD_TORCH_CHECK(!int8_activations || is_down_in_bytes(args.dtype_of_down()),
                  "pi2: int8_activations: expected false with float weights, found true. Pack int4 or int8 weights.");
  args = with_settings(args, x, bias_type(args.dtype_of_down()), bias_gate, bias_up, bias_down, activation,
                       activation_on_up, threshold, int8_activations, thresholds);
  STD_TORCH_CHECK(!args.shaping.cuts() || (first == 0 && kind == "none"),
                  "pi2: activation: expected one without sigmas where a predictor chooses neurons or some are computed "
                  "elsewhere, found ",
                  activation, ". Every gate of it is needed here.");
  STD_TORCH_CHECK(!args.shaping.norms() || (first == 0 && parts == 0),
                  "pi2: activation: expected one without rms where some neurons are computed elsewhere, found ",
                  activation, ". Its norm is of all neurons together.");
  const Tensor x_dense = dense(x);
  if (parts != 0) {
    const int64_t most = std::min(kGemmTokens, kStreamFrom) - 1, chunks = args.chunks();
    STD_TORCH_CHECK(parts == chunks && first == 0, "pi2: parts: expected 0 or ", chunks,
                    ", the chunks of the whole layer, found ", parts, ". See torch_pi2.ops.ffn.stored_ffn.");
    STD_TORCH_CHECK(args.tokens <= most, "pi2: x: expected at most ", most, " tokens where parts are asked for, found ",
                    args.tokens, ". Ask for the sum.");
  }
  Tensor out = parts == 0 ? torch::stable::new_empty(x, x.sizes())
                          : torch::stable::empty({parts, args.tokens, args.hidden}, ScalarType::Float);
  args.x = x_dense.const_data_ptr();
  if (parts == 0)
    args.y = out.mutable_data_ptr();
  else
    args.parts = static_cast<float*>(out.mutable_data_ptr());
  Predictor any;
  if (kind == "gate") {
    any = gate_in_memory(args, predictor, false);
  } else if (kind != "none") {
    any = any_predictor(x, args, predictor, kind, cut, predictor_weights, predictor_int8_activations);
    any.lowrank.doubt = static_cast<float>(offload->miss_margin());
  } else {
    STD_TORCH_CHECK(predictor.empty(), "pi2: predictor: expected no tensors for kind none, found ", predictor.size(),
                    ". See torch_pi2.ops.ffn.stored_ffn.");
  }
  if (args.tokens == 0) return out;
  std::function<void()> then = look_ahead(*offload, next.get(), layer + 1, args);
  if (const auto asked = asked_behind(store, layer))
    then = [asked, own = std::move(then)] {
      if (own) own();
      asked();
    };
  const std::string problem = offload->ffn(layer, any, args, torch_threads(), then);
  STD_TORCH_CHECK(problem.empty(), "pi2: reading the neuron store: ", problem);
  return out;
}

// CRC32C of each row of a contiguous uint8 [n, bytes]: int64 [n].
Tensor crc32c_rows(const Tensor& rows) {
  check_plain(rows, "rows");
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Byte && rows.dim() == 2 && rows.is_contiguous(),
                  "pi2: rows: expected contiguous uint8 [n, bytes], found ", shape_of(rows),
                  rows.scalar_type() == ScalarType::Byte ? "" : " of another dtype", ". Call .contiguous().");
  Tensor out = torch::stable::empty({rows.size(0)}, ScalarType::Long);
  const auto* data = static_cast<const char*>(rows.const_data_ptr());
  auto* sums = static_cast<int64_t*>(out.mutable_data_ptr());
  const auto bytes = static_cast<size_t>(rows.size(1));
  for (int64_t i = 0; i < rows.size(0); ++i) sums[i] = crc32c(data + static_cast<size_t>(i) * bytes, bytes);
  return out;
}

}  // namespace
}  // namespace pi2::binding

STABLE_TORCH_LIBRARY_FRAGMENT(pi2, m) {
  m.def(
      "store_open(str path, int cache_bytes, str engine, str policy, int io_threads, bool direct, bool verify, "
      "bool pipeline, int window, int in_flight, int run_bytes, int gap_bytes, float hot_share, bool spin, "
      "float[] device, float miss_margin, float drop_experts) -> int");
  m.def("store_close(int store) -> bool");
  m.def("store_layers(int store) -> Tensor");
  m.def("store_preload(int store) -> str");
  m.def("store_leave_out(int store, int[] first) -> bool");
  m.def("store_describe(int store) -> str");
  m.def("store_stats(int store, bool reset) -> Tensor");
  m.def(
      "store_lookahead(int store, int layer, Tensor[] predictor, str kind, float cut, str predictor_weights, "
      "bool predictor_int8_activations, int n_hot) -> bool");
  m.def("store_prefetch(int store, int layer, int n_hot, Tensor active, int after=-1) -> bool");
  m.def(
      "stored_ffn(Tensor x, int store, int layer, Tensor? bias_gate, Tensor? bias_up, Tensor? bias_down, "
      "Tensor[] predictor, str kind, float cut, str predictor_weights, bool predictor_int8_activations, "
      "str activation, bool activation_on_up, int n_hot, float threshold, bool int8_activations=False, "
      "int first=0, Tensor? thresholds=None, int parts=0) -> Tensor");
  m.def("crc32c(Tensor rows) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CompositeExplicitAutograd, m) {
  m.impl("store_open", TORCH_BOX(&pi2::binding::store_open));
  m.impl("store_close", TORCH_BOX(&pi2::binding::store_close));
  m.impl("store_layers", TORCH_BOX(&pi2::binding::store_layers));
  m.impl("store_preload", TORCH_BOX(&pi2::binding::store_preload));
  m.impl("store_leave_out", TORCH_BOX(&pi2::binding::store_leave_out));
  m.impl("store_describe", TORCH_BOX(&pi2::binding::store_describe));
  m.impl("store_stats", TORCH_BOX(&pi2::binding::store_stats));
  m.impl("store_lookahead", TORCH_BOX(&pi2::binding::store_lookahead));
  m.impl("store_prefetch", TORCH_BOX(&pi2::binding::store_prefetch));
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CPU, m) {
  m.impl("stored_ffn", TORCH_BOX(&pi2::binding::stored_ffn));
  m.impl("crc32c", TORCH_BOX(&pi2::binding::crc32c_rows));
}
