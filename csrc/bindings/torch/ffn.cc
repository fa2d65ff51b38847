// torch.ops.pi2.sparse_ffn and other operators on neurons in memory.
#include "bindings/torch/ffn.h"

#include "bindings/activations.h"
#include "pi2/kernels.h"
#include "pi2/memory.h"

namespace pi2::binding {
namespace {

void set_activation(const std::string& name, FfnArgs* args) {
  if (read_activation(name, &args->activation, &args->shaping)) return;
  std::string names;
  for (std::size_t i = 0; i < kActivationCount; ++i)
    names += (i == 0 ? "" : i + 1 == kActivationCount ? " or " : ", ") + std::string(kActivations[i]);
  STD_TORCH_CHECK(false, "pi2: activation: expected ", names, ", found '", name, "'. See torch_pi2.ops.ACTIVATIONS.");
}

// Neurons whose down rows have a format of their own: uint8 [neurons, bytes].
FfnArgs mixed_neurons(const Tensor& x, const Tensor& neuron_rows, const std::string& weights) {
  FfnArgs args;
  args.hidden = x.dim() >= 1 ? x.size(x.dim() - 1) : 0;
  const std::string::size_type plus = weights.find('+');
  args.w_dtype = rows_dtype(weights.substr(0, plus), args.hidden);
  const std::string down_weights = weights.substr(plus + 1);
  args.down_dtype =
      down_weights == "tq2_0" && args.w_dtype == DType::kTQ2 ? DType::kTQ2 : quantized_dtype(down_weights);
  args.other_down = true;
  const bool bytes = neuron_rows.dim() == 2 && neuron_rows.scalar_type() == ScalarType::Byte &&
                     neuron_rows.is_contiguous() && neuron_rows.numel() > 0 && args.hidden > 0;
  for (args.rows = 3; args.rows > 1; --args.rows)
    if (bytes && neuron_rows.size(1) == args.neuron_bytes()) break;
  const int64_t first = args.row_bytes(), down = args.neuron_bytes() - args.down_offset();
  STD_TORCH_CHECK(args.rows > 1, "pi2: neuron_rows: expected contiguous uint8 [neurons, ", 2 * first + down,
                  " (gate, up, down) or ", first + down, " (up, down)] (hidden size ", args.hidden, " of x in ",
                  weights, "), found ", bytes ? "" : "another layout or dtype, ", shape_of(neuron_rows),
                  ". Put the bytes of a neuron's rows one behind the other.");
  args.neurons = neuron_rows.size(0);
  return args;
}

// Neurons with 3 or 2 rows of one format.
FfnArgs even_neurons(const Tensor& x, const Tensor& neuron_rows, const std::string& weights, bool int8_activations) {
  FfnArgs args;
  args.apart = apart(neuron_rows);
  STD_TORCH_CHECK(neuron_rows.dim() == 3 && (neuron_rows.size(1) == 2 || neuron_rows.size(1) == 3) &&
                      (neuron_rows.is_contiguous() || args.apart != 0),
                  "pi2: neuron_rows: expected contiguous [neurons, 3 (gate, up, down) or 2 (up, down), hidden], or all "
                  "up rows and then all down rows as such a view, found ",
                  neuron_rows.dim(), " dimensions or other strides. Build them with torch_pi2.layers.ffn.");
  std::string kind = weights;
  args.up_blocks = take_blocks(&kind);
  args.w_dtype = weights_dtype(kind, neuron_rows, "neuron_rows");
  args.neurons = neuron_rows.size(0);
  args.rows = neuron_rows.size(1);
  STD_TORCH_CHECK(neuron_rows.numel() > 0,
                  "pi2: neuron_rows: expected neurons, found an empty tensor. Check the layer.");
  if (is_quantized(args.w_dtype)) {
    args.hidden = x.dim() >= 1 ? x.size(x.dim() - 1) : 0;
    STD_TORCH_CHECK(args.hidden > 0 && neuron_rows.size(2) == args.row_bytes(), "pi2: neuron_rows: expected rows of ",
                    args.row_bytes(), " bytes (hidden size ", args.hidden, " of x in ", weights, "), found ",
                    neuron_rows.size(2), ". Pass hidden states of this model and the weights it was quantised to.");
  } else {
    args.hidden = neuron_rows.size(2);
    check_hidden(x, args.hidden);
    STD_TORCH_CHECK(!int8_activations,
                    "pi2: int8_activations: expected false with float weights, found true. Quantise the weights to "
                    "int4 or int8 first.");
  }
  return args;
}

}  // namespace

int64_t apart(const Tensor& neuron_rows) {
  const bool two = neuron_rows.dim() == 3 && neuron_rows.size(1) == 2 && neuron_rows.size(0) > 1;
  const int64_t row = two ? neuron_rows.size(2) : 0;
  if (!two || neuron_rows.stride(2) != 1 || neuron_rows.stride(0) != row ||
      neuron_rows.stride(1) < row * neuron_rows.size(0))
    return 0;
  return neuron_rows.stride(1) * neuron_rows.element_size();
}

FfnArgs ffn_args(const Tensor& x, const Tensor& neuron_rows, const MaybeTensor& bias_gate, const MaybeTensor& bias_up,
                 const MaybeTensor& bias_down, const std::string& activation, bool activation_on_up, int64_t n_hot,
                 double threshold, const std::string& weights, bool int8_activations, const MaybeTensor& thresholds) {
  check_plain(x, "x");
  check_plain(neuron_rows, "neuron_rows");
  FfnArgs args = has_two_formats(weights) ? mixed_neurons(x, neuron_rows, weights)
                                          : even_neurons(x, neuron_rows, weights, int8_activations);
  STD_TORCH_CHECK(n_hot >= 0 && n_hot <= args.neurons, "pi2: n_hot: expected 0 to ", args.neurons, ", found ", n_hot,
                  ". Check the plan.");
  args.neuron_rows = neuron_rows.const_data_ptr();
  args.n_hot = n_hot;
  const ScalarType like = is_down_in_bytes(args.dtype_of_down()) ? ScalarType::Float : neuron_rows.scalar_type();
  args = with_settings(args, x, like, bias_gate, bias_up, bias_down, activation, activation_on_up, threshold,
                       int8_activations, thresholds);
  STD_TORCH_CHECK(
      !args.up_blocks || (args.apart != 0 && args.neurons % kPanelRows == 0 && takes_up_blocks(args)),
      "pi2: neuron_rows in blocks: expected int8 activations, kernels for blocks, and neurons without gates, "
      "a multiple of 16, with all up rows before all down rows, each of a multiple of 64 numbers, found ",
      args.neurons, " neurons of ", args.rows, " x ", args.hidden,
      ". Pass them in rows, which leave_blocks() of a layer brings back.");
  return args;
}

void check_no_blocks(const FfnArgs& args) {
  STD_TORCH_CHECK(!args.up_blocks,
                  "pi2: neuron_rows with a mask or a predictor: expected rows in their own order, found blocks. Call "
                  "leave_blocks() of the layer first.");
}

FfnArgs with_settings(FfnArgs args, const Tensor& x, ScalarType like, const MaybeTensor& bias_gate,
                      const MaybeTensor& bias_up, const MaybeTensor& bias_down, const std::string& activation,
                      bool activation_on_up, double threshold, bool int8_activations, const MaybeTensor& thresholds) {
  STD_TORCH_CHECK(threshold >= 0, "pi2: threshold: expected 0 or more, found ", threshold, ". Check the plan.");
  args.x_dtype = float_dtype(x, "x");
  const char* wanted =
      is_down_in_bytes(args.dtype_of_down()) ? "float32 (the weights are quantised)" : "that of neuron_rows";
  args.bias_gate = bias_data(bias_gate, "bias_gate", args.neurons, like, wanted);
  args.bias_up = bias_data(bias_up, "bias_up", args.neurons, like, wanted);
  args.bias_down = bias_data(bias_down, "bias_down", args.hidden, like, wanted);
  args.tokens = x.numel() / args.hidden;
  set_activation(activation, &args);
  args.activation_on_up = activation_on_up;
  STD_TORCH_CHECK(!args.shaping.cuts() || !activation_on_up,
                  "pi2: activation_on_up: expected false with sigmas, which are of the gates, found true. Correct it.");
  STD_TORCH_CHECK(!args.shaping.second || (args.rows == 3 && !activation_on_up),
                  "pi2: activation: expected one without second but for gated neurons without an activation on the "
                  "other matrix, found ",
                  activation, ". Correct it.");
  STD_TORCH_CHECK(!args.shaping.norms() || (args.rows == 3 && !activation_on_up),
                  "pi2: activation: expected one without rms but for gated neurons without an activation on up, found ",
                  activation, ". Correct it.");
  args.threshold = static_cast<float>(threshold);
  args.thresholds = static_cast<const float*>(
      bias_data(thresholds, "thresholds", args.neurons, ScalarType::Float, "float32, whatever the weights"));
  args.int8_activations = int8_activations;
  return args;
}

namespace {

Tensor sparse_ffn_out(const Tensor& x, const Tensor& neuron_rows, const MaybeTensor& bias_gate,
                      const MaybeTensor& bias_up, const MaybeTensor& bias_down, const MaybeTensor& active,
                      const Text& activation, bool activation_on_up, int64_t n_hot, double threshold,
                      const Text& weights, bool int8_activations, const MaybeTensor& thresholds, Tensor out) {
  check_plain(out, "out");
  FfnArgs args = ffn_args(x, neuron_rows, bias_gate, bias_up, bias_down, activation, activation_on_up, n_hot, threshold,
                          weights, int8_activations, thresholds);
  STD_TORCH_CHECK(out.scalar_type() == x.scalar_type() && out.numel() == x.numel() && out.is_contiguous(),
                  "pi2: out: expected a contiguous tensor with x's dtype and ", x.numel(), " elements, found ",
                  out.numel(), ". Use torch.empty_like(x).");
  const Tensor x_dense = dense(x);
  std::optional<Tensor> active_dense;
  if (active) {
    check_mask(*active, "active", x, args.tokens, args.neurons - n_hot);
    active_dense = dense(*active);
    args.active = static_cast<const uint8_t*>(active_dense->const_data_ptr());
    check_no_blocks(args);
  }
  args.x = x_dense.const_data_ptr();
  args.y = out.mutable_data_ptr();
  if (args.tokens > 0) pi2::sparse_ffn(args, torch_threads());
  return out;
}

Tensor sparse_ffn(const Tensor& x, const Tensor& neuron_rows, const MaybeTensor& bias_gate, const MaybeTensor& bias_up,
                  const MaybeTensor& bias_down, const MaybeTensor& active, const Text& activation,
                  bool activation_on_up, int64_t n_hot, double threshold, const Text& weights, bool int8_activations,
                  const MaybeTensor& thresholds) {
  Tensor out = torch::stable::new_empty(x, x.sizes());
  sparse_ffn_out(x, neuron_rows, bias_gate, bias_up, bias_down, active, activation, activation_on_up, n_hot, threshold,
                 weights, int8_activations, thresholds, out);
  return out;
}

Tensor add_parts(const Tensor& parts, std::vector<int64_t> order, const MaybeTensor& bias, const Tensor& like) {
  check_plain(parts, "parts");
  check_plain(like, "like");
  PartsArgs args;
  args.y_dtype = float_dtype(like, "like");
  STD_TORCH_CHECK(parts.scalar_type() == ScalarType::Float && parts.dim() == 3 && like.dim() > 0 &&
                      like.size(-1) == parts.size(2) && like.numel() == parts.size(1) * parts.size(2),
                  "pi2: parts: expected float32 [parts, tokens, hidden] for like of so many tokens, found ",
                  shape_of(parts), " for ", shape_of(like), ". Gather what stored_ffn(parts=...) returns.");
  const Tensor parts_dense = dense(parts);
  args.parts = static_cast<const float*>(parts_dense.const_data_ptr());
  args.tokens = parts.size(1);
  args.hidden = parts.size(2);
  for (const int64_t place : order)
    STD_TORCH_CHECK(place >= 0 && place < parts.size(0), "pi2: order: expected 0 to ", parts.size(0) - 1, ", found ",
                    place, ". Check the shards.");
  args.order = order.data();
  args.count = static_cast<int64_t>(order.size());
  Tensor bias_dense;
  if (bias) {
    args.bias_dtype = float_dtype(*bias, "bias");
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == args.hidden, "pi2: bias: expected ", args.hidden,
                    " numbers, found ", shape_of(*bias), ". It is of another layer.");
    bias_dense = dense(*bias);
    args.bias = bias_dense.const_data_ptr();
  }
  Tensor out = torch::stable::new_empty(like, like.sizes());
  args.y = out.mutable_data_ptr();
  pi2::add_parts(args);
  return out;
}

int64_t plain_read(const Tensor& neuron_rows, const MaybeTensor& index) {
  check_plain(neuron_rows, "neuron_rows");
  STD_TORCH_CHECK(neuron_rows.is_contiguous() && neuron_rows.dim() >= 1 && neuron_rows.size(0) > 0,
                  "pi2: neuron_rows: expected a contiguous, non-empty tensor, found another. Call .contiguous().");
  const int64_t element = neuron_rows.element_size();
  const int64_t bytes = neuron_rows.numel() / neuron_rows.size(0) * element;
  if (!index)
    return static_cast<int64_t>(
        pi2::plain_read(neuron_rows.const_data_ptr(), bytes, neuron_rows.size(0), nullptr, torch_threads()));
  check_plain(*index, "index");
  STD_TORCH_CHECK(index->scalar_type() == ScalarType::Long && index->dim() == 1 && index->is_contiguous(),
                  "pi2: index: expected a contiguous int64 vector, found another. Use torch.nonzero(...).flatten().");
  const auto* ids = static_cast<const int64_t*>(index->const_data_ptr());
  for (int64_t i = 0; i < index->size(0); ++i)
    STD_TORCH_CHECK(ids[i] >= 0 && ids[i] < neuron_rows.size(0), "pi2: index: expected 0 to ", neuron_rows.size(0) - 1,
                    ", found ", ids[i], ". Check the neuron ids.");
  return static_cast<int64_t>(
      pi2::plain_read(neuron_rows.const_data_ptr(), bytes, index->size(0), ids, torch_threads()));
}

bool advise_huge_pages(const Tensor& tensor) {
  return pi2::advise_huge_pages(tensor.mutable_data_ptr(), tensor.numel() * tensor.element_size());
}

// Returns the number of bytes.
int64_t give_back(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_contiguous(), "pi2: tensor: expected a contiguous one, found ", shape_of(tensor),
                  " with gaps. Give its parts back one by one.");
  return pi2::give_back(tensor.mutable_data_ptr(), tensor.numel() * tensor.element_size());
}

}  // namespace
}  // namespace pi2::binding

STABLE_TORCH_LIBRARY_FRAGMENT(pi2, m) {
  const std::string ffn =
      "Tensor x, Tensor neuron_rows, Tensor? bias_gate, Tensor? bias_up, Tensor? bias_down, Tensor? active, str activation, "
      "bool activation_on_up, int n_hot, float threshold, str weights=\"float\", bool int8_activations=False, "
      "Tensor? thresholds=None";
  m.def(("sparse_ffn(" + ffn + ") -> Tensor").c_str());
  m.def("add_parts(Tensor parts, int[] order, Tensor? bias, Tensor like) -> Tensor");
  m.def(("sparse_ffn.out(" + ffn + ", *, Tensor(a!) out) -> Tensor(a!)").c_str());
  m.def("plain_read(Tensor neuron_rows, Tensor? index) -> int");
  m.def("advise_huge_pages(Tensor tensor) -> bool");
  m.def("give_back(Tensor(a!) tensor) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CPU, m) {
  m.impl("sparse_ffn", TORCH_BOX(&pi2::binding::sparse_ffn));
  m.impl("add_parts", TORCH_BOX(&pi2::binding::add_parts));
  m.impl("sparse_ffn.out", TORCH_BOX(&pi2::binding::sparse_ffn_out));
  m.impl("plain_read", TORCH_BOX(&pi2::binding::plain_read));
  m.impl("advise_huge_pages", TORCH_BOX(&pi2::binding::advise_huge_pages));
  m.impl("give_back", TORCH_BOX(&pi2::binding::give_back));
}
