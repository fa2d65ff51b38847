// torch.ops.pi2.experts_ffn and stored_experts: mixtures of experts, in memory and over a neuron store.
#include "pi2/experts.h"

#include <cmath>

#include "bindings/torch/common.h"
#include "bindings/torch/ffn.h"
#include "bindings/torch/offload.h"
#include "bindings/torch/predict.h"

namespace pi2::binding {
namespace {

// Tensors in the form that the core reads, and the arguments that point into them.
struct Routed {
  Tensor x, index, routing, y;
  ExpertsArgs args;
};

Routed routed(const Tensor& x, const Tensor& index, const Tensor& routing, int64_t experts) {
  check_plain(x, "x");
  check_plain(index, "index");
  check_plain(routing, "routing");
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "pi2: shape of x: expected [tokens, hidden], found ", shape_of(x),
                  ". Flatten the leading dimensions.");
  STD_TORCH_CHECK(index.scalar_type() == ScalarType::Long,
                  "pi2: dtype of index: expected int64, found another. Use .long().");
  STD_TORCH_CHECK(index.dim() == 2 && index.size(0) == x.size(0), "pi2: shape of index: expected [", x.size(0),
                  " (tokens of x), slots], found ", shape_of(index), ". Pass the router's top k of these tokens.");
  STD_TORCH_CHECK(routing.dim() == 2 && routing.size(0) == index.size(0) && routing.size(1) == index.size(1),
                  "pi2: shape of routing: expected that of index, ", shape_of(index), ", found ", shape_of(routing),
                  ". Pass the router's top k of these tokens.");
  Routed r{dense(x), dense(index), dense(routing), torch::stable::new_empty(x, x.sizes()), {}};
  r.args.x = r.x.const_data_ptr();
  r.args.y = r.y.mutable_data_ptr();
  r.args.x_dtype = float_dtype(x, "x");
  r.args.tokens = x.size(0);
  r.args.hidden = x.size(1);
  r.args.index = static_cast<const int64_t*>(r.index.const_data_ptr());
  r.args.routing = r.routing.const_data_ptr();
  r.args.routing_dtype = float_dtype(routing, "routing");
  r.args.slots = index.size(1);
  r.args.experts = experts;
  return r;
}

// The first expert's bias out of [experts, ...]; the core finds the others behind it.
MaybeTensor of_first(const MaybeTensor& biases, int64_t experts, const char* name) {
  if (!biases) return std::nullopt;
  check_plain(*biases, name);
  STD_TORCH_CHECK(biases->dim() == 2 && biases->size(0) == experts && biases->is_contiguous(), "pi2: ", name,
                  ": expected contiguous [", experts, " experts, ...], found ",
                  biases->is_contiguous() ? "" : "strided ", shape_of(*biases), ". Stack the biases of all experts.");
  return torch::stable::select(*biases, 0, 0);
}

// `layer` with the thresholds and predictors of all experts. Tensors and numbers must outlive the result. The first
// first_neuron neurons of each expert are computed elsewhere. `slots`: experts of a token of x, negative: x is no
// call's.
ExpertStack stack_of(const Tensor& x, const FfnArgs& layer, int64_t experts, const std::vector<Tensor>& tensors,
                     const std::string& kind, const std::vector<double>& cuts, const std::string& weights,
                     bool int8_activations, const std::vector<double>& thresholds, int64_t slots,
                     int64_t first_neuron = 0) {
  STD_TORCH_CHECK(first_neuron >= 0 && first_neuron < layer.neurons && first_neuron % 64 == 0,
                  "pi2: first: expected a multiple of 64 below ", layer.neurons, ", found ", first_neuron,
                  ". It is how many neurons of each expert are computed elsewhere.");
  ExpertStack stack;
  stack.layer = layer;
  stack.layer.first = stack.layer.n_hot = first_neuron;  // of which no predictor is asked
  STD_TORCH_CHECK(thresholds.empty() || static_cast<int64_t>(thresholds.size()) == experts,
                  "pi2: thresholds: expected none, or ", experts, ", one for each expert, found ", thresholds.size(),
                  ". See torch_pi2.ops.experts.");
  for (size_t e = 0; e < thresholds.size(); ++e)
    STD_TORCH_CHECK(thresholds[e] >= 0, "pi2: thresholds: expected 0 or more, found ", thresholds[e], " for expert ", e,
                    ". Check the plan.");
  if (!thresholds.empty()) stack.thresholds = thresholds.data();
  STD_TORCH_CHECK(!layer.shaping.cuts() && !layer.shaping.second && !layer.shaping.norms(),
                  "pi2: activation: expected one without sigmas, second and rms for experts, found some. "
                  "See torch_pi2.ops.experts.");
  if (kind == "none") {
    STD_TORCH_CHECK(tensors.empty() && cuts.empty(),
                    "pi2: predictor: expected no tensors and cuts for kind none, found ", tensors.size(), " and ",
                    cuts.size(), ". See torch_pi2.ops.experts.");
    return stack;
  }
  if (kind == "gate") {
    stack.predictor = gate_in_memory(stack.layer, tensors, true);
    check_plain(tensors[1], "numbers of gate rows");
    STD_TORCH_CHECK(cuts.empty() && tensors[1].scalar_type() == ScalarType::Long && tensors[1].dim() == 1 &&
                        tensors[1].size(0) == experts && tensors[1].is_contiguous(),
                    "pi2: predictor: expected no cuts, and numbers of gate rows as contiguous int64 [", experts,
                    "] for kind gate, found ", cuts.size(), " and ", shape_of(tensors[1]),
                    ". See torch_pi2.ops.experts.");
    stack.gates = static_cast<const int64_t*>(tensors[1].const_data_ptr());
    for (int64_t e = 0; e < experts; ++e)
      STD_TORCH_CHECK(stack.gates[e] < tensors[0].size(0), "pi2: numbers of gate rows: expected less than ",
                      tensors[0].size(0), ", found ", stack.gates[e], " for expert ", e,
                      ". See torch_pi2.ops.experts.");
    return stack;
  }
  if (kind == "mask") {
    STD_TORCH_CHECK(slots >= 0,
                    "pi2: kind: expected a predictor that computes, found 'mask', which is of one call. Leave "
                    "early routing out.");
    STD_TORCH_CHECK(tensors.size() == 1 && cuts.empty(),
                    "pi2: predictor: expected 1 tensor and no cuts for kind mask, ", "found ", tensors.size(), " and ",
                    cuts.size(), ". See torch_pi2.ops.experts.");
    const Tensor& active = tensors[0];
    check_plain(active, "mask");
    STD_TORCH_CHECK(active.scalar_type() == ScalarType::Bool && active.dim() == 3 && active.size(0) == x.size(0) &&
                        active.size(1) == slots && active.size(2) == layer.neurons && active.is_contiguous(),
                    "pi2: mask: expected contiguous bool [", x.size(0), " tokens, ", slots, " slots, ", layer.neurons,
                    " neurons], found ", active.is_contiguous() ? "" : "strided ", shape_of(active),
                    active.scalar_type() == ScalarType::Bool ? "" : " of another dtype",
                    ". It is a choice for each pair of a token and an expert.");
    stack.predictor.kind = Predictor::Kind::kMask;
    stack.predictor.mask = {static_cast<const uint8_t*>(active.const_data_ptr()), layer.neurons};
    return stack;
  }
  STD_TORCH_CHECK(static_cast<int64_t>(cuts.size()) == experts, "pi2: cuts: expected ", experts,
                  ", one for each expert, found ", cuts.size(), ". See torch_pi2.ops.experts.");
  std::vector<Tensor> first;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string name = "predictor tensor " + std::to_string(i);
    check_plain(tensors[i], name.c_str());
    STD_TORCH_CHECK(tensors[i].dim() >= 2 && tensors[i].size(0) == experts && tensors[i].is_contiguous(), "pi2: ", name,
                    ": expected contiguous [", experts, " experts, ...], found ",
                    tensors[i].is_contiguous() ? "" : "strided ", shape_of(tensors[i]),
                    ". Stack the tensors of all experts.");
    first.push_back(torch::stable::select(tensors[i], 0, 0));
  }
  stack.predictor = any_predictor(x, layer, first, kind, cuts[0], weights, int8_activations);
  const Tensor& by_neuron = first[kind == "lowrank" ? 2 : kind == "lowrank_q" ? 1 : 0];
  STD_TORCH_CHECK(!stack.predictor.lowrank.blocks && by_neuron.size(0) == layer.neurons,
                  "pi2: predictor: expected rows of ", layer.neurons, " neurons for each expert, found ",
                  by_neuron.size(0), stack.predictor.lowrank.blocks ? " in blocks" : "",
                  ". Experts have no hot neurons.");
  for (size_t e = 0; e < cuts.size(); ++e)
    STD_TORCH_CHECK(kind == "signbit" ? cuts[e] >= 0 && std::isfinite(cuts[e]) : !std::isnan(cuts[e]),
                    "pi2: cuts: expected ", kind == "signbit" ? "finite margins of at least 0" : "thresholds",
                    ", found ", cuts[e], " for expert ", e, ". Fit the predictor again.");
  stack.cuts = cuts.data();
  return stack;
}

Tensor experts_ffn(const Tensor& x, const Tensor& index, const Tensor& routing, const Tensor& neuron_rows,
                   std::vector<Tensor> predictor, const Text& kind, std::vector<double> cuts,
                   const Text& predictor_weights, bool predictor_int8_activations, const Text& activation,
                   bool activation_on_up, std::vector<double> thresholds, const Text& weights, bool int8_activations,
                   const MaybeTensor& bias_gate, const MaybeTensor& bias_up, const MaybeTensor& bias_down,
                   int64_t first_neuron) {
  check_plain(neuron_rows, "neuron_rows");
  const bool two = has_two_formats(weights);
  const int64_t dim = two ? 3 : 4;
  const bool known = neuron_rows.dim() == dim && neuron_rows.numel() > 0;
  const bool follow = known && neuron_rows.stride(0) == neuron_rows.numel() / neuron_rows.size(0);
  STD_TORCH_CHECK(known && (neuron_rows.is_contiguous() || (!two && follow)),
                  "pi2: neuron_rows: expected contiguous [experts, neurons, ",
                  two ? "bytes]" : "3 (gate, up, down) or 2 (up, down), hidden]", ", none of them 0, found ",
                  neuron_rows.is_contiguous() ? "" : "strided ", shape_of(neuron_rows),
                  ". Stack the neurons of all experts, each as sparse_ffn takes them.");
  const Routed r = routed(x, index, routing, neuron_rows.size(0));
  const Tensor first = torch::stable::select(neuron_rows, 0, 0);
  const int64_t experts = neuron_rows.size(0);
  const MaybeTensor gate = of_first(bias_gate, experts, "bias_gate"), up = of_first(bias_up, experts, "bias_up");
  const MaybeTensor down = of_first(bias_down, experts, "bias_down");
  const FfnArgs layer =
      ffn_args(x, first, gate, up, down, activation, activation_on_up, 0, 0, weights, int8_activations);
  if (kind != "none") check_no_blocks(layer);
  const ExpertStack stack = stack_of(x, layer, r.args.experts, predictor, kind, cuts, predictor_weights,
                                     predictor_int8_activations, thresholds, r.args.slots, first_neuron);
  const std::string problem = pi2::experts_ffn(r.args, stack, torch_threads());
  STD_TORCH_CHECK(problem.empty(), "pi2: ", problem);
  return r.y;
}

// The name of the formats, as operators take it: int4, q4_k+int8.
std::string formats_of(const FfnArgs& layer) {
  return name_of(layer.w_dtype) + (layer.other_down ? "+" + std::string(name_of(layer.down_dtype)) : "");
}

// The sizes of layers [first, first + experts) of a store, which must be equal.
FfnArgs common_shape(const Offload& store, int64_t first, int64_t experts) {
  STD_TORCH_CHECK(experts >= 1 && experts <= store.layers(), "pi2: experts: expected 1 to ", store.layers(), ", found ",
                  experts, ". The store is of another model.");
  STD_TORCH_CHECK(first >= 0 && first <= store.layers() - experts, "pi2: first_layer: expected 0 to ",
                  store.layers() - experts, " (", experts, " experts of ", store.layers(), " layers), found ", first,
                  ". The store is of another model.");
  FfnArgs shape = store.shape(first);
  for (int64_t l = first + 1; l < first + experts; ++l) {
    const FfnArgs other = store.shape(l);
    STD_TORCH_CHECK(other.neurons == shape.neurons && other.rows == shape.rows && other.hidden == shape.hidden &&
                        other.w_dtype == shape.w_dtype && other.dtype_of_down() == shape.dtype_of_down(),
                    "pi2: experts: expected layers of equal sizes, found layer ", l, " of ", other.neurons, " x ",
                    other.rows, " x ", other.hidden, " ", formats_of(other), " and layer ", first, " of ",
                    shape.neurons, " x ", shape.rows, " x ", shape.hidden, " ", formats_of(shape),
                    ". The store is of another model.");
  }
  shape.n_hot = 0;
  return shape;
}

Tensor stored_experts(const Tensor& x, const Tensor& index, const Tensor& routing, int64_t store, int64_t first_layer,
                      int64_t experts, std::vector<Tensor> predictor, const Text& kind, std::vector<double> cuts,
                      const Text& predictor_weights, bool predictor_int8_activations, const Text& activation,
                      bool activation_on_up, std::vector<double> thresholds, bool int8_activations,
                      const MaybeTensor& bias_gate, const MaybeTensor& bias_up, const MaybeTensor& bias_down,
                      int64_t first_neuron) {
  const std::shared_ptr<Offload> offload = store_of(store);
  FfnArgs layer = common_shape(*offload, first_layer, experts);
  const Routed r = routed(x, index, routing, experts);
  check_hidden(x, layer.hidden);
  STD_TORCH_CHECK(!int8_activations || is_down_in_bytes(layer.dtype_of_down()),
                  "pi2: int8_activations: expected false with float weights, found true. Pack int4 or int8 weights.");
  const MaybeTensor gate = of_first(bias_gate, experts, "bias_gate"), up = of_first(bias_up, experts, "bias_up");
  const MaybeTensor down = of_first(bias_down, experts, "bias_down");
  layer = with_settings(layer, x, bias_type(layer.dtype_of_down()), gate, up, down, activation, activation_on_up, 0,
                        int8_activations);
  const ExpertStack stack = stack_of(x, layer, experts, predictor, kind, cuts, predictor_weights,
                                     predictor_int8_activations, thresholds, r.args.slots, first_neuron);
  const Guesses guesses = early_routing(store, first_layer);
  const std::string problem =
      pi2::stored_experts(r.args, stack, *offload, first_layer, torch_threads(), nullptr,
                          guesses.next == nullptr ? nullptr : &guesses.next->next,
                          guesses.own == nullptr ? nullptr : &guesses.own->record, asked_behind(store, first_layer));
  STD_TORCH_CHECK(problem.empty(), "pi2: ", problem);
  return r.y;
}

// Sets the router of the mixture whose first layer is `first_layer`, so that stored_experts of the mixture before it
// (first layer `at`) can prefetch its neurons.
bool store_early_routing(int64_t store, int64_t at, int64_t first_layer, int64_t experts, const Tensor& router,
                         const MaybeTensor& bias, const MaybeTensor& correction, int64_t chosen,
                         std::vector<Tensor> predictor, const Text& kind, std::vector<double> cuts,
                         const Text& predictor_weights, bool predictor_int8_activations) {
  const std::shared_ptr<Offload> offload = store_of(store);
  const FfnArgs layer = common_shape(*offload, first_layer, experts);
  STD_TORCH_CHECK(at >= 0 && at < first_layer, "pi2: at: expected 0 to ", first_layer - 1, ", found ", at,
                  ". Experts are guessed while a mixture before theirs is computed.");
  STD_TORCH_CHECK(offload->shape(at).hidden == layer.hidden, "pi2: hidden size of layer ", first_layer, ": expected ",
                  offload->shape(at).hidden, ", as layer ", at, " has, found ", layer.hidden,
                  ". Leave early routing out.");
  check_plain(router, "router");
  STD_TORCH_CHECK(
      router.dim() == 2 && router.size(0) == experts && router.size(1) == layer.hidden && router.is_contiguous(),
      "pi2: router: expected contiguous [", experts, ", ", layer.hidden, "], found ",
      router.is_contiguous() ? "" : "strided ", shape_of(router), ". Pass the weight of the router's linear layer.");
  STD_TORCH_CHECK(chosen >= 1 && chosen <= experts, "pi2: chosen: expected 1 to ", experts, ", found ", chosen,
                  ". It is how many experts a token has.");
  const auto made = std::make_shared<EarlyRouting>();
  made->tensors = predictor;
  made->tensors.push_back(router);
  for (const MaybeTensor& one : {bias, correction})
    if (one) made->tensors.push_back(*one);
  made->cuts = std::move(cuts);
  Router& linear = made->next.router;
  linear.weights = router.const_data_ptr();
  linear.dtype = float_dtype(router, "router");
  linear.bias = static_cast<const float*>(bias_data(bias, "bias", experts, ScalarType::Float, "float32"));
  linear.correction =
      static_cast<const float*>(bias_data(correction, "correction", experts, ScalarType::Float, "float32"));
  linear.experts = experts;
  linear.hidden = layer.hidden;
  linear.chosen = chosen;
  made->next.record = &made->record;
  const Tensor x = torch::stable::empty({1, layer.hidden}, ScalarType::Float);  // for the checks of its size
  made->next.stack =
      stack_of(x, layer, experts, predictor, kind, made->cuts, predictor_weights, predictor_int8_activations, {}, -1);
  made->next.first_layer = first_layer;
  route_early(store, at, made);
  return true;
}

}  // namespace
}  // namespace pi2::binding

STABLE_TORCH_LIBRARY_FRAGMENT(pi2, m) {
  const std::string tokens = "Tensor x, Tensor index, Tensor routing, ";
  const std::string predictor =
      "Tensor[] predictor, str kind, float[] cuts, str predictor_weights, bool predictor_int8_activations, "
      "str activation, bool activation_on_up, float[] thresholds, ";
  const std::string biases = ", Tensor? bias_gate=None, Tensor? bias_up=None, Tensor? bias_down=None, int first=0";
  m.def(("experts_ffn(" + tokens + "Tensor neuron_rows, " + predictor + "str weights, bool int8_activations=False" +
         biases + ") -> Tensor")
            .c_str());
  m.def(("stored_experts(" + tokens + "int store, int first_layer, int experts, " + predictor +
         "bool int8_activations=False" + biases + ") -> Tensor")
            .c_str());
  m.def(
      "store_early_routing(int store, int at, int first_layer, int experts, Tensor router, Tensor? bias, "
      "Tensor? correction, int chosen, Tensor[] predictor, str kind, float[] cuts, str predictor_weights, "
      "bool predictor_int8_activations) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CPU, m) {
  m.impl("experts_ffn", TORCH_BOX(&pi2::binding::experts_ffn));
  m.impl("stored_experts", TORCH_BOX(&pi2::binding::stored_experts));
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CompositeExplicitAutograd, m) {
  m.impl("store_early_routing", TORCH_BOX(&pi2::binding::store_early_routing));
}
