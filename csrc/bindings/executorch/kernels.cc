// pi2::linear.out, dequantize.out, sparse_ffn.out and predicted_ffn.out for ExecuTorch, with weights in the .pte
// itself. The schemas are those of csrc/bindings/torch.
#include <cmath>
#include <string>
#include <string_view>

#include "bindings/activations.h"
#include "bindings/executorch/operators.h"
#include "bindings/executorch/threads.h"
#include "bindings/formats.h"
#include "pi2/ffn.h"
#include "pi2/linear.h"
#include "pi2/predict.h"

namespace pi2::et {
namespace {

using executorch::aten::ArrayRef;

DType quantized_dtype(std::string_view weights) {
  expect(weights == "int4" || weights == "int8", "weights", "int4 or int8", std::string(weights));
  return weights == "int4" ? DType::kQ4 : DType::kQ8;
}

// "int4", "int8" and ggml's formats; `columns` must be a multiple of their block size.
DType rows_dtype(std::string_view weights, std::int64_t columns) {
  const DType dtype = binding::ggml_dtype(std::string(weights));
  if (!is_ggml(dtype)) return quantized_dtype(weights);
  const std::int64_t numbers = ggml_block(dtype).numbers;
  expect(columns % numbers == 0, "columns", "a multiple of " + std::to_string(numbers), std::to_string(columns));
  return dtype;
}

// The data of a contiguous tensor with this dtype and these sizes.
const void* typed(const Tensor& tensor, const char* what, ScalarType dtype, std::int64_t rows, std::int64_t columns) {
  const bool shape = columns > 0 ? tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns
                                 : tensor.dim() == 1 && tensor.size(0) == rows;
  expect(tensor.scalar_type() == dtype && shape, what,
         "[" + std::to_string(rows) + (columns > 0 ? ", " + std::to_string(columns) : "") + "] of its dtype",
         shape_of(tensor));
  return tensor.const_data_ptr();
}

const void* bias_data(const MaybeTensor& bias, const char* what, std::int64_t length, ScalarType dtype) {
  return bias ? typed(*bias, what, dtype, length, 0) : nullptr;
}

// Resizes out to the sizes of x with another last one.
void resize(Tensor& out, const Tensor& x, std::int64_t last) {
  executorch::aten::SizesType sizes[16];
  expect(x.dim() <= 16, "x", "16 dimensions at most", std::to_string(x.dim()));
  for (executorch::aten::SizesType d = 0; d < x.dim(); ++d)
    sizes[d] = static_cast<executorch::aten::SizesType>(d + 1 == x.dim() ? last : x.size(d));
  expect(out.scalar_type() == x.scalar_type(), "out", "the dtype of x", "another");
  expect(executorch::runtime::resize_tensor(out, {sizes, static_cast<std::size_t>(x.dim())}) == Error::Ok, "out",
         "room for " + std::to_string(x.dim() == 0 ? 0 : x.numel() / x.size(x.dim() - 1)) + " tokens", shape_of(out));
}

std::int64_t hidden_of(const Tensor& x) {
  expect(x.dim() >= 1 && x.size(x.dim() - 1) > 0, "x", "[..., hidden]", shape_of(x));
  for (std::size_t d = 0; d < static_cast<std::size_t>(x.dim()); ++d)
    expect(x.dim_order()[d] == d, "x", "a contiguous tensor", "another order");
  return x.size(x.dim() - 1);
}

// The layer, without the data of x and out and without the mask.
FfnArgs ffn_args(const Tensor& x, const Tensor& neuron_rows, const MaybeTensor& bias_gate, const MaybeTensor& bias_up,
                 const MaybeTensor& bias_down, std::string_view activation, bool activation_on_up, std::int64_t n_hot,
                 double threshold, std::string_view weights, bool int8_activations, const MaybeTensor& thresholds) {
  FfnArgs args;
  args.hidden = hidden_of(x);
  args.x_dtype = float_dtype(x, "x");
  args.w_dtype = weights == "float" ? float_dtype(neuron_rows, "neuron_rows") : quantized_dtype(weights);
  const bool quantized = is_quantized(args.w_dtype);
  const std::int64_t last = quantized ? row_bytes(args.w_dtype, args.hidden) : args.hidden;
  expect(neuron_rows.dim() == 3 && neuron_rows.size(0) > 0 && (neuron_rows.size(1) == 2 || neuron_rows.size(1) == 3) &&
             neuron_rows.size(2) == last && (neuron_rows.scalar_type() == ScalarType::Byte) == quantized,
         "neuron_rows", "[neurons, 2 or 3, " + std::to_string(last) + "]", shape_of(neuron_rows));
  args.neurons = neuron_rows.size(0);
  args.rows = neuron_rows.size(1);
  args.neuron_rows = neuron_rows.const_data_ptr();
  const ScalarType like = quantized ? ScalarType::Float : neuron_rows.scalar_type();
  args.bias_gate = bias_data(bias_gate, "bias_gate", args.neurons, like);
  args.bias_up = bias_data(bias_up, "bias_up", args.neurons, like);
  args.bias_down = bias_data(bias_down, "bias_down", args.hidden, like);
  const std::string name(activation);
  expect(binding::read_activation(name, &args.activation, &args.shaping), "activation",
         "one of torch_pi2.ops.ACTIVATIONS", name);
  args.activation_on_up = activation_on_up;
  expect(!args.shaping.cuts() || !activation_on_up, "activation_on_up", "false with sigmas", "true");
  expect(!args.shaping.second || (args.rows == 3 && !activation_on_up), "activation",
         "one without second but for gated neurons", name);
  expect(!args.shaping.norms(), "activation", "one without rms", name);
  expect(n_hot >= 0 && n_hot <= args.neurons, "n_hot", "0 to " + std::to_string(args.neurons), std::to_string(n_hot));
  args.n_hot = n_hot;
  expect(threshold >= 0, "threshold", "0 or more", std::to_string(threshold));
  args.threshold = static_cast<float>(threshold);
  args.thresholds = static_cast<const float*>(bias_data(thresholds, "thresholds", args.neurons, ScalarType::Float));
  expect(!int8_activations || quantized, "int8_activations", "false with float weights", "true");
  args.int8_activations = int8_activations;
  args.tokens = x.numel() / args.hidden;
  return args;
}

Predictor any_predictor(const FfnArgs& args, ArrayRef<Tensor> tensors, std::string_view kind, double cut,
                        std::string_view weights, bool int8_activations) {
  const std::int64_t cold = args.neurons - args.n_hot;
  const bool signbit = kind == "signbit", scaled = kind == "lowrank";
  const std::size_t least = signbit ? 1 : scaled ? 4 : kind == "lowrank_q" ? 2 : 0;
  expect(least > 0, "kind", "lowrank, lowrank_q or signbit", std::string(kind));
  expect(tensors.size() == least || (!signbit && tensors.size() == least + 1), "predictor",
         std::to_string(least) + " tensors (and a bias)", std::to_string(tensors.size()));
  Predictor made;
  if (signbit) {
    expect(cut >= 0 && std::isfinite(cut), "cut", "a margin of 0 or more", std::to_string(cut));
    made.kind = Predictor::Kind::kSignbit;
    made.signbit.columns = args.hidden;
    made.signbit.cold = cold;
    made.signbit.margin = cut;
    made.signbit.signs = typed(tensors[0], "signs", ScalarType::Byte, cold, sign_bytes(args.hidden));
    return made;
  }
  made.kind = Predictor::Kind::kLowrank;
  LowrankArgs& low = made.lowrank;
  expect(tensors[0].dim() == 2 && tensors[0].size(0) > 0, "predictor tensor a", "[rank, ...]", shape_of(tensors[0]));
  low.dtype = scaled ? DType::kI8 : quantized_dtype(weights);
  low.hidden = args.hidden;
  low.rank = tensors[0].size(0);
  low.cold = cold;
  low.threshold = static_cast<float>(cut);
  low.int8_activations = !scaled && int8_activations;
  const ScalarType stored = scaled ? ScalarType::Char : ScalarType::Byte;
  const std::size_t b = scaled ? 2 : 1;
  low.a = typed(tensors[0], "predictor tensor a", stored, low.rank, row_bytes(low.dtype, low.hidden));
  low.b = typed(tensors[b], "predictor tensor b", stored, cold, row_bytes(low.dtype, low.rank));
  const auto floats = [&](std::size_t i, const char* what, std::int64_t n) {
    return static_cast<const float*>(typed(tensors[i], what, ScalarType::Float, n, 0));
  };
  if (scaled) low.a_scale = floats(1, "predictor tensor a_scale", low.rank);
  if (scaled) low.b_scale = floats(3, "predictor tensor b_scale", cold);
  if (tensors.size() > least) low.b_bias = floats(least, "predictor tensor b_bias", cold);
  return made;
}

Tensor& linear_out(KernelRuntimeContext& context, const Tensor& x, const Tensor& rows, const MaybeTensor& bias,
                   std::string_view weights, bool int8_activations, Tensor& out) {
  guarded(context, "pi2::linear.out", [&] {
    LinearArgs args;
    args.columns = hidden_of(x);
    args.x_dtype = float_dtype(x, "x");
    args.w_dtype = rows_dtype(weights, args.columns);
    expect(rows.dim() == 2, "rows", "[rows, bytes]", shape_of(rows));
    args.rows = rows.size(0);
    args.weights = typed(rows, "rows", ScalarType::Byte, args.rows, row_bytes(args.w_dtype, args.columns));
    args.bias = static_cast<const float*>(bias_data(bias, "bias", args.rows, ScalarType::Float));
    args.tokens = x.numel() / args.columns;
    args.int8_activations = int8_activations;
    resize(out, x, args.rows);
    args.x = x.const_data_ptr();
    args.y = out.mutable_data_ptr();
    if (args.tokens > 0 && args.rows > 0) pi2::linear(args, executorch_threads());
  });
  return out;
}

Tensor& dequantize_out(KernelRuntimeContext& context, const Tensor& rows, std::string_view weights,
                       std::int64_t columns, ScalarType dtype, Tensor& out) {
  guarded(context, "pi2::dequantize.out", [&] {
    expect(columns > 0 && rows.dim() == 2, "rows", "[rows, bytes]", shape_of(rows));
    const DType from = rows_dtype(weights, columns);
    const std::int64_t bytes = row_bytes(from, columns);
    const void* data = typed(rows, "rows", ScalarType::Byte, rows.size(0), bytes);
    expect(out.scalar_type() == dtype, "out", "the dtype that was asked for", "another");
    const executorch::aten::SizesType sizes[] = {static_cast<executorch::aten::SizesType>(rows.size(0)),
                                                 static_cast<executorch::aten::SizesType>(columns)};
    expect(executorch::runtime::resize_tensor(out, {sizes, 2}) == Error::Ok, "out",
           "room for " + std::to_string(rows.size(0)) + " rows", shape_of(out));
    pi2::dequantize(data, from, rows.size(0), columns, bytes, out.mutable_data_ptr(), float_dtype(out, "out"),
                    executorch_threads());
  });
  return out;
}

Tensor& sparse_ffn_out(KernelRuntimeContext& context, const Tensor& x, const Tensor& neuron_rows,
                       const MaybeTensor& bias_gate, const MaybeTensor& bias_up, const MaybeTensor& bias_down,
                       const MaybeTensor& active, std::string_view activation, bool activation_on_up,
                       std::int64_t n_hot, double threshold, std::string_view weights, bool int8_activations,
                       const MaybeTensor& thresholds, Tensor& out) {
  guarded(context, "pi2::sparse_ffn.out", [&] {
    FfnArgs args = ffn_args(x, neuron_rows, bias_gate, bias_up, bias_down, activation, activation_on_up, n_hot,
                            threshold, weights, int8_activations, thresholds);
    if (active) {
      const std::int64_t cold = args.neurons - n_hot;
      expect(active->scalar_type() == ScalarType::Bool && active->numel() == args.tokens * cold &&
                 (cold == 0 || active->size(active->dim() - 1) == cold),
             "active", std::to_string(args.tokens) + " tokens x " + std::to_string(cold) + " cold neurons",
             shape_of(*active));
      args.active = static_cast<const std::uint8_t*>(active->const_data_ptr());
    }
    resize(out, x, args.hidden);
    args.x = x.const_data_ptr();
    args.y = out.mutable_data_ptr();
    if (args.tokens > 0) pi2::sparse_ffn(args, executorch_threads());
  });
  return out;
}

Tensor& predicted_ffn_out(KernelRuntimeContext& context, const Tensor& x, const Tensor& neuron_rows,
                          const MaybeTensor& bias_gate, const MaybeTensor& bias_up, const MaybeTensor& bias_down,
                          ArrayRef<Tensor> predictor, std::string_view kind, double cut,
                          std::string_view predictor_weights, bool predictor_int8_activations,
                          std::string_view activation, bool activation_on_up, std::int64_t n_hot, double threshold,
                          std::string_view weights, bool int8_activations, const MaybeTensor& thresholds, Tensor& out) {
  guarded(context, "pi2::predicted_ffn.out", [&] {
    FfnArgs args = ffn_args(x, neuron_rows, bias_gate, bias_up, bias_down, activation, activation_on_up, n_hot,
                            threshold, weights, int8_activations, thresholds);
    const Predictor any = any_predictor(args, predictor, kind, cut, predictor_weights, predictor_int8_activations);
    resize(out, x, args.hidden);
    args.x = x.const_data_ptr();
    args.y = out.mutable_data_ptr();
    if (args.tokens > 0) pi2::predicted_ffn(any, args, executorch_threads());
  });
  return out;
}

constexpr char kLinear[] = "pi2::linear.out", kDequantize[] = "pi2::dequantize.out", kSparse[] = "pi2::sparse_ffn.out",
               kPredicted[] = "pi2::predicted_ffn.out";
[[maybe_unused]] const Error added[] = {
    add(kLinear, EXECUTORCH_FN(linear_out, kLinear)),
    add(kDequantize, EXECUTORCH_FN(dequantize_out, kDequantize)),
    add(kSparse, EXECUTORCH_FN(sparse_ffn_out, kSparse)),
    add(kPredicted, EXECUTORCH_FN(predicted_ffn_out, kPredicted)),
};

}  // namespace
}  // namespace pi2::et
