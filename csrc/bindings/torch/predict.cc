// torch.ops.pi2.predict_*: predictors; predicted_ffn: predictor and layer in one call.
#include "bindings/torch/predict.h"

#include <cmath>

#include "bindings/torch/ffn.h"
#include "pi2/kernels.h"
#include "pi2/linear.h"

namespace pi2::binding {
namespace {

// The data of a predictor's tensor: contiguous, `dtype`, [rows, columns], or [rows] if `columns` is 0.
const void* typed_data(const Tensor& tensor, const char* name, ScalarType dtype, int64_t rows, int64_t columns) {
  const std::string what = std::string("predictor tensor ") + name;
  const char* again = ". Fit the predictor again.";
  check_plain(tensor, what.c_str());
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, "pi2: dtype of ", what, ": expected ",
                  dtype == ScalarType::Char ? "int8" : "float32", ", found another", again);
  const bool shape = columns > 0 ? tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns
                                 : tensor.dim() == 1 && tensor.size(0) == rows;
  STD_TORCH_CHECK(shape, "pi2: shape of ", what, ": expected [", rows,
                  columns > 0 ? ", " + std::to_string(columns) : std::string(), "], found ", shape_of(tensor), again);
  STD_TORCH_CHECK(tensor.is_contiguous(), "pi2: layout of ", what,
                  ": expected contiguous, found strided. Call .contiguous().");
  return tensor.const_data_ptr();
}

void check_matrices(const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2, "pi2: predictor tensors a and b: expected 2 dimensions each, found ",
                  a.dim(), " and ", b.dim(), ". Fit the predictor again.");
  STD_TORCH_CHECK(a.size(0) > 0 && a.size(1) > 0,
                  "pi2: predictor tensor a: expected a row and a column at least, found ", shape_of(a),
                  ". Fit the predictor again.");
}

// int8 matrices with a scale per row.
LowrankArgs lowrank_args(const Tensor& x, const Tensor& a, const Tensor& a_scale, const Tensor& b,
                         const Tensor& b_scale, const MaybeTensor& b_bias, double threshold) {
  check_matrices(a, b);
  LowrankArgs args;
  args.rank = a.size(0);
  args.hidden = a.size(1);
  args.cold = b.size(0);
  check_hidden(x, args.hidden);
  args.a = typed_data(a, "a", ScalarType::Char, args.rank, args.hidden);
  args.a_scale = static_cast<const float*>(typed_data(a_scale, "a_scale", ScalarType::Float, args.rank, 0));
  args.b = typed_data(b, "b", ScalarType::Char, args.cold, args.rank);
  args.b_scale = static_cast<const float*>(typed_data(b_scale, "b_scale", ScalarType::Float, args.cold, 0));
  if (b_bias) args.b_bias = static_cast<const float*>(typed_data(*b_bias, "b_bias", ScalarType::Float, args.cold, 0));
  args.threshold = static_cast<float>(threshold);
  return args;
}

// Rows quantised in groups, or blocks of them: then b has a bias for each cold neuron, and may have rows before theirs.
LowrankArgs lowrank_q_args(const Tensor& x, const Tensor& a, const Tensor& b, const MaybeTensor& b_bias,
                           const std::string& weights, bool int8_activations, double threshold) {
  check_matrices(a, b);
  LowrankArgs args;
  std::string kind = weights;
  args.blocks = take_blocks(&kind);
  args.dtype = quantized_dtype(kind);
  args.rank = a.size(0);
  args.hidden = x.dim() >= 1 ? x.size(x.dim() - 1) : 0;
  args.cold = args.blocks && b_bias && b_bias->dim() == 1 ? b_bias->size(0) : b.size(0);
  args.skipped = b.size(0) - args.cold;
  STD_TORCH_CHECK(args.hidden > 0, "pi2: x: expected [..., hidden], found ", x.dim(), " dimensions of ", x.numel(),
                  " elements in all. Pass hidden states of this model.");
  args.a = quantized_rows(a, "predictor tensor a", args.dtype, args.rank, args.hidden);
  args.b = quantized_rows(b, "predictor tensor b", args.dtype, args.skipped + args.cold, args.rank);
  if (b_bias) args.b_bias = static_cast<const float*>(typed_data(*b_bias, "b_bias", ScalarType::Float, args.cold, 0));
  args.int8_activations = int8_activations;
  STD_TORCH_CHECK(!args.blocks || (int8_activations && takes_blocks(args.dtype) && args.skipped >= 0 &&
                                   in_blocks(args.rank, args.hidden) && in_blocks(b.size(0), args.rank)),
                  "pi2: predictor in blocks: expected int8 activations, kernels for blocks, and blocks of 16 rows and "
                  "64 columns with at least as many rows as b has biases, found a of ",
                  args.rank, " x ", args.hidden, ", b of ", b.size(0), " x ", args.rank, ", ", args.cold,
                  " neurons. Pass it in rows, which leave_blocks() of a layer brings back.");
  args.threshold = static_cast<float>(threshold);
  return args;
}

SignbitArgs signbit_args(const Tensor& x, const Tensor& signs, int64_t columns, double margin) {
  STD_TORCH_CHECK(columns > 0, "pi2: columns: expected 1 or more, found ", columns, ". It is the layer's hidden size.");
  check_hidden(x, columns);
  check_plain(signs, "signs");
  const char* pack = " Pack them with torch_pi2.predict.signbit.pack_signs.";
  STD_TORCH_CHECK(signs.scalar_type() == ScalarType::Byte, "pi2: dtype of signs: expected uint8, found another.", pack);
  STD_TORCH_CHECK(signs.dim() == 2 && signs.size(1) == sign_bytes(columns), "pi2: shape of signs: expected [neurons, ",
                  sign_bytes(columns), "] for hidden size ", columns, ", found ", shape_of(signs), ".", pack);
  STD_TORCH_CHECK(signs.is_contiguous(),
                  "pi2: layout of signs: expected contiguous, found strided. Call .contiguous().");
  STD_TORCH_CHECK(margin >= 0 && std::isfinite(margin), "pi2: margin: expected a finite number of at least 0, found ",
                  margin, ". Calibrate it with torch_pi2.fitting.train.calibrate.");
  SignbitArgs args;
  args.columns = columns;
  args.signs = signs.const_data_ptr();
  args.cold = signs.size(0);
  args.margin = margin;
  return args;
}

template <class Args>
Tensor predicted(const Tensor& x, Args args, int64_t hidden, void (*predict)(const Args&, const ParallelFor&)) {
  check_plain(x, "x");
  args.x_dtype = float_dtype(x, "x");
  args.tokens = x.numel() / hidden;
  std::vector<int64_t> shape;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) shape.push_back(x.size(d));
  shape.push_back(args.cold);
  Tensor active = torch::stable::new_empty(x, shape, ScalarType::Bool);
  const Tensor x_dense = dense(x);
  args.x = x_dense.const_data_ptr();
  args.active = static_cast<uint8_t*>(active.mutable_data_ptr());
  if (args.tokens > 0 && args.cold > 0) predict(args, torch_threads());
  return active;
}

// A mask bool [..., n], with a row for each token of x.
MaskArgs mask_args(const Tensor& x, const Tensor& active) {
  MaskArgs args;
  args.columns = active.dim() > 0 ? active.size(active.dim() - 1) : 0;
  const int64_t hidden = x.size(x.dim() - 1);
  check_mask(active, "predictor tensor active", x, hidden > 0 ? x.numel() / hidden : 0, args.columns);
  STD_TORCH_CHECK(active.is_contiguous(),
                  "pi2: layout of predictor tensor active: expected contiguous, found strided. Call .contiguous().");
  args.mask = static_cast<const uint8_t*>(active.const_data_ptr());
  return args;
}

// Skips the first `count` neurons, which are hot now.
void skip_rows(SignbitArgs& args, int64_t count) {
  args.signs = static_cast<const char*>(args.signs) + count * sign_bytes(args.columns);
  args.cold -= count;
}

void skip_rows(LowrankArgs& args, int64_t count) {
  if (args.blocks)
    args.skipped += count;
  else
    args.b = static_cast<const char*>(args.b) + count * row_bytes(args.dtype, args.rank);
  if (args.b_scale != nullptr) args.b_scale += count;
  if (args.b_bias != nullptr) args.b_bias += count;
  args.cold -= count;
}

Tensor predict_lowrank(const Tensor& x, const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                       const MaybeTensor& b_bias, double threshold) {
  const LowrankArgs args = lowrank_args(x, a, a_scale, b, b_scale, b_bias, threshold);
  return predicted(x, args, args.hidden, &pi2::predict_lowrank);
}

Tensor predict_lowrank_q(const Tensor& x, const Tensor& a, const Tensor& b, const MaybeTensor& b_bias,
                         const Text& weights, bool int8_activations, double threshold) {
  const LowrankArgs args = lowrank_q_args(x, a, b, b_bias, weights, int8_activations, threshold);
  return predicted(x, args, args.hidden, &pi2::predict_lowrank);
}

Tensor predict_signbit(const Tensor& x, const Tensor& signs, int64_t columns, double margin) {
  return predicted(x, signbit_args(x, signs, columns, margin), columns, &pi2::predict_signbit);
}

}  // namespace

Predictor any_predictor(const Tensor& x, const FfnArgs& args, const std::vector<Tensor>& tensors,
                        const std::string& kind, double cut, const std::string& weights, bool int8_activations) {
  const bool signbit = kind == "signbit", mask = kind == "mask";
  const size_t least = kind == "lowrank" ? 4 : kind == "lowrank_q" ? 2 : signbit || mask ? 1 : 0;
  STD_TORCH_CHECK(least > 0, "pi2: kind: expected lowrank, lowrank_q, signbit or mask, found '", kind,
                  "'. See torch_pi2.ops.ffn.predicted_ffn.");
  const size_t most = signbit || mask ? least : least + 1;  // low-rank ones may have a bias
  STD_TORCH_CHECK(tensors.size() == least || tensors.size() == most, "pi2: predictor: expected ", least,
                  most > least ? " tensors (and a bias)" : " tensor", " for kind ", kind, ", found ", tensors.size(),
                  ". See torch_pi2.ops.ffn.predicted_ffn.");
  Predictor made;
  const MaybeTensor bias = tensors.size() > least ? MaybeTensor(tensors[least]) : std::nullopt;
  made.kind = signbit ? Predictor::Kind::kSignbit : mask ? Predictor::Kind::kMask : Predictor::Kind::kLowrank;
  if (mask)
    made.mask = mask_args(x, tensors[0]);
  else if (signbit)
    made.signbit = signbit_args(x, tensors[0], args.hidden, cut);
  else if (kind == "lowrank")
    made.lowrank = lowrank_args(x, tensors[0], tensors[1], tensors[2], tensors[3], bias, cut);
  else
    made.lowrank = lowrank_q_args(x, tensors[0], tensors[1], bias, weights, int8_activations, cut);
  const int64_t found = mask ? made.mask.columns : signbit ? made.signbit.cold : made.lowrank.cold;
  const int64_t cold = args.neurons - args.n_hot;
  STD_TORCH_CHECK(found >= cold, "pi2: predictor: expected at least ", cold, " cold neurons (", args.neurons, " less ",
                  args.n_hot, " hot), found ", found,
                  mask ? ". Its last columns are those of cold neurons in plan order."
                       : ". Its last rows are those of cold neurons in plan order.");
  if (signbit)
    skip_rows(made.signbit, found - cold);
  else if (!mask)
    skip_rows(made.lowrank, found - cold);
  return made;
}

namespace {

Tensor predicted_ffn_out(const Tensor& x, const Tensor& neuron_rows, const MaybeTensor& bias_gate,
                         const MaybeTensor& bias_up, const MaybeTensor& bias_down, std::vector<Tensor> predictor,
                         const Text& kind, double cut, const Text& predictor_weights, bool predictor_int8_activations,
                         const Text& activation, bool activation_on_up, int64_t n_hot, double threshold,
                         const Text& weights, bool int8_activations, const MaybeTensor& thresholds, const Tensor& out) {
  FfnArgs args = ffn_args(x, neuron_rows, bias_gate, bias_up, bias_down, activation, activation_on_up, n_hot, threshold,
                          weights, int8_activations, thresholds);
  check_no_blocks(args);
  const Predictor any = any_predictor(x, args, predictor, kind, cut, predictor_weights, predictor_int8_activations);
  check_out(out, x, std::vector<int64_t>(x.sizes().begin(), x.sizes().end()));
  const Tensor x_dense = dense(x);
  args.x = x_dense.const_data_ptr();
  args.y = out.mutable_data_ptr();
  if (args.tokens > 0) pi2::predicted_ffn(any, args, torch_threads());
  return out;
}

Tensor predicted_ffn(const Tensor& x, const Tensor& neuron_rows, const MaybeTensor& bias_gate,
                     const MaybeTensor& bias_up, const MaybeTensor& bias_down, std::vector<Tensor> predictor,
                     const Text& kind, double cut, const Text& predictor_weights, bool predictor_int8_activations,
                     const Text& activation, bool activation_on_up, int64_t n_hot, double threshold,
                     const Text& weights, bool int8_activations, const MaybeTensor& thresholds) {
  Tensor out = torch::stable::new_empty(x, x.sizes());
  return predicted_ffn_out(x, neuron_rows, bias_gate, bias_up, bias_down, predictor, kind, cut, predictor_weights,
                           predictor_int8_activations, activation, activation_on_up, n_hot, threshold, weights,
                           int8_activations, thresholds, out);
}

}  // namespace
}  // namespace pi2::binding

STABLE_TORCH_LIBRARY_FRAGMENT(pi2, m) {
  m.def(
      "predict_lowrank(Tensor x, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? b_bias, float threshold) "
      "-> Tensor");
  m.def(
      "predict_lowrank_q(Tensor x, Tensor a, Tensor b, Tensor? b_bias, str weights, bool int8_activations, "
      "float threshold) -> Tensor");
  m.def("predict_signbit(Tensor x, Tensor signs, int columns, float margin) -> Tensor");
  const std::string ffn =
      "Tensor x, Tensor neuron_rows, Tensor? bias_gate, Tensor? bias_up, Tensor? bias_down, "
      "Tensor[] predictor, str kind, float cut, str predictor_weights, bool predictor_int8_activations, "
      "str activation, bool activation_on_up, int n_hot, float threshold, str weights=\"float\", "
      "bool int8_activations=False, Tensor? thresholds=None";
  m.def(("predicted_ffn(" + ffn + ") -> Tensor").c_str());
  m.def(("predicted_ffn.out(" + ffn + ", *, Tensor(a!) out) -> Tensor(a!)").c_str());
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CPU, m) {
  m.impl("predict_lowrank", TORCH_BOX(&pi2::binding::predict_lowrank));
  m.impl("predict_lowrank_q", TORCH_BOX(&pi2::binding::predict_lowrank_q));
  m.impl("predict_signbit", TORCH_BOX(&pi2::binding::predict_signbit));
  m.impl("predicted_ffn", TORCH_BOX(&pi2::binding::predicted_ffn));
  m.impl("predicted_ffn.out", TORCH_BOX(&pi2::binding::predicted_ffn_out));
}
