// torch.ops.pi2.linear, linear_blocks, sparse_input_linear, quantize, dequantize.
#include "pi2/linear.h"

#include <cmath>
#include <sstream>

#include "bindings/torch/common.h"
#include "pi2/kernels.h"

namespace pi2::binding {
namespace {

// All arguments except y.
LinearArgs linear_args(const Tensor& x, const Tensor& rows, const MaybeTensor& bias, const std::string& weights,
                       bool int8_activations) {
  check_plain(x, "x");
  LinearArgs args;
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) > 0, "pi2: x: expected [..., columns], found ", x.dim(),
                  " dimensions of ", x.numel(), " elements in all. Pass the input of a linear layer.");
  STD_TORCH_CHECK(rows.dim() == 2, "pi2: rows: expected uint8 [rows, bytes], found ", rows.dim(),
                  " dimensions. Quantise the weight with torch.ops.pi2.quantize.");
  args.columns = x.size(x.dim() - 1);
  args.w_dtype = rows_dtype(weights, args.columns);
  args.rows = rows.size(0);
  args.weights = quantized_rows(rows, "rows", args.w_dtype, args.rows, args.columns);
  args.bias = static_cast<const float*>(bias_data(bias, "bias", args.rows, ScalarType::Float, "float32"));
  args.x_dtype = float_dtype(x, "x");
  args.tokens = x.numel() / args.columns;
  args.int8_activations = int8_activations;
  return args;
}

std::vector<int64_t> linear_shape(const Tensor& x, const LinearArgs& args) {
  std::vector<int64_t> shape;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) shape.push_back(x.size(d));
  shape.push_back(args.rows);
  return shape;
}

void run(LinearArgs args, const Tensor& x, const Tensor& y) {
  const Tensor x_dense = dense(x);
  args.x = x_dense.const_data_ptr();
  args.y = y.mutable_data_ptr();
  if (args.tokens > 0 && args.rows > 0) pi2::linear(args, torch_threads());
}

Tensor linear(const Tensor& x, const Tensor& rows, const MaybeTensor& bias, const Text& weights,
              bool int8_activations) {
  const LinearArgs args = linear_args(x, rows, bias, weights, int8_activations);
  Tensor y = torch::stable::new_empty(x, linear_shape(x, args));
  run(args, x, y);
  return y;
}

Tensor linear_out(const Tensor& x, const Tensor& rows, const MaybeTensor& bias, const Text& weights,
                  bool int8_activations, const Tensor& out) {
  const LinearArgs args = linear_args(x, rows, bias, weights, int8_activations);
  check_out(out, x, linear_shape(x, args));
  run(args, x, out);
  return out;
}

LinearArgs blocks_args(const Tensor& x, const Tensor& blocks, const MaybeTensor& bias, const std::string& weights) {
  LinearArgs args = linear_args(x, blocks, bias, weights, true);
  STD_TORCH_CHECK(
      in_blocks(args.rows, args.columns) && takes_blocks(args.w_dtype),
      "pi2: blocks: expected a multiple of 16 rows and of 64 columns, and kernels that take blocks, found ", args.rows,
      " rows, ", args.columns, " columns of ", weights, " and kernels for ", kernels().isa,
      ". Call torch.ops.pi2.linear with rows in their own order, which leave_blocks() of a layer brings back.");
  args.blocks = true;
  return args;
}

Tensor linear_blocks(const Tensor& x, const Tensor& blocks, const MaybeTensor& bias, const Text& weights) {
  const LinearArgs args = blocks_args(x, blocks, bias, weights);
  Tensor y = torch::stable::new_empty(x, linear_shape(x, args));
  run(args, x, y);
  return y;
}

Tensor sparse_input_linear(const Tensor& x, const Tensor& rows, int64_t outputs, const MaybeTensor& bias,
                           const MaybeTensor& active, double threshold, const Text& weights) {
  check_plain(x, "x");
  check_plain(rows, "rows");
  InputLinearArgs args;
  args.x_dtype = float_dtype(x, "x");
  args.channels = x.dim() >= 1 ? x.size(x.dim() - 1) : 0;
  args.outputs = outputs;
  STD_TORCH_CHECK(args.channels > 0 && outputs > 0,
                  "pi2: x and outputs: expected [..., channels] and 1 or more, found ", shape_of(x), " and ", outputs,
                  ". Pass the input and the output size of a linear layer.");
  args.w_dtype = weights_dtype(weights, rows, "rows");
  const int64_t width = is_quantized(args.w_dtype) ? row_bytes(args.w_dtype, outputs) : outputs;
  STD_TORCH_CHECK(rows.dim() == 2 && rows.size(0) == args.channels && rows.size(1) == width && rows.is_contiguous(),
                  "pi2: rows: expected contiguous [", args.channels, " channels, ", width, "] (", outputs,
                  " outputs in ", weights, "), found ", rows.is_contiguous() ? "" : "strided ", shape_of(rows),
                  ". A row has the weights of one input channel: pass the layer's weight transposed.");
  args.weights = rows.const_data_ptr();
  args.bias = static_cast<const float*>(bias_data(bias, "bias", outputs, ScalarType::Float, "float32"));
  args.tokens = x.numel() / args.channels;
  STD_TORCH_CHECK(threshold >= 0, "pi2: threshold: expected 0 or more, found ", threshold,
                  ". It is a cut on the magnitude of inputs.");
  args.threshold = static_cast<float>(threshold);
  std::optional<Tensor> active_dense;
  if (active) {
    check_mask(*active, "active", x, args.tokens, args.channels);
    active_dense = dense(*active);
    args.active = static_cast<const uint8_t*>(active_dense->const_data_ptr());
  }
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = outputs;
  Tensor y = torch::stable::new_empty(x, shape);
  const Tensor x_dense = dense(x);
  args.x = x_dense.const_data_ptr();
  args.y = y.mutable_data_ptr();
  if (args.tokens > 0) pi2::sparse_input_linear(args, torch_threads());
  return y;
}

std::string text_of(float value) {
  if (std::isnan(value)) return "NaN";
  std::ostringstream text;
  text << value;
  return text.str();
}

void check_fault(const QuantizeFault& fault, const std::string& weights, DType to) {
  STD_TORCH_CHECK(!fault.found, "pi2: w: expected finite weights of at most ", static_cast<int64_t>(largest_weight(to)),
                  " (", weights, " with float16 scales), found ", text_of(fault.value), " in row ", fault.row,
                  ", column ", fault.column, ". Check the checkpoint; quantised weights would hide the fault.");
}

Tensor quantize(const Tensor& w, const Text& weights) {
  check_plain(w, "w");
  const DType to = quantized_dtype(weights);
  STD_TORCH_CHECK(w.dim() == 2 && w.size(1) > 0, "pi2: w: expected [rows, columns], found ", w.dim(), " dimensions of ",
                  w.numel(), " elements in all. Pass the weight of a linear layer.");
  const int64_t count = w.size(0), columns = w.size(1);
  Tensor rows = torch::stable::new_empty(w, {count, row_bytes(to, columns)}, ScalarType::Byte);
  const Tensor w_dense = dense(w);
  check_fault(pi2::quantize(w_dense.const_data_ptr(), float_dtype(w, "w"), count, columns, to, rows.mutable_data_ptr(),
                            torch_threads()),
              weights, to);
  return rows;
}

Tensor dequantize_out(const Tensor& rows, const Text& weights, int64_t columns, ScalarType dtype, const Tensor& out) {
  check_plain(rows, "rows");
  check_plain(out, "out");
  const DType from = rows_dtype(weights, columns);
  STD_TORCH_CHECK(columns > 0 && rows.dim() == 2 && rows.scalar_type() == ScalarType::Byte &&
                      rows.size(1) == row_bytes(from, columns) &&
                      (rows.size(0) < 2 || rows.stride(0) >= rows.size(1)) && rows.stride(1) == 1,
                  "pi2: rows: expected uint8 [rows, ", columns > 0 ? row_bytes(from, columns) : 0, "] for ", columns,
                  " columns of ", weights, ", found ", rows.dim(), " dimensions of ", rows.numel(),
                  " elements in all or another dtype. Pass the columns and the format it was quantised with.");
  STD_TORCH_CHECK(out.dim() == 2 && out.size(0) == rows.size(0) && out.size(1) == columns &&
                      out.scalar_type() == dtype && out.is_contiguous(),
                  "pi2: out: expected a contiguous tensor of ", rows.size(0), " x ", columns,
                  " with the dtype that was asked for, found ", out.scalar_type() == dtype ? "" : "another dtype, ",
                  out.is_contiguous() ? "" : "strided, ", shape_of(out), ". Make it with torch.empty.");
  pi2::dequantize(rows.const_data_ptr(), from, rows.size(0), columns, rows.stride(0), out.mutable_data_ptr(),
                  float_dtype(out, "dtype"), torch_threads());
  return out;
}

Tensor dequantize(const Tensor& rows, const Text& weights, int64_t columns, ScalarType dtype) {
  check_plain(rows, "rows");
  const int64_t count = rows.dim() == 2 ? rows.size(0) : 0;
  return dequantize_out(rows, weights, columns, dtype,
                        torch::stable::new_empty(rows, {count, columns > 0 ? columns : 0}, dtype));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pi2, m) {
  const std::string linear = "Tensor x, Tensor rows, Tensor? bias, str weights, bool int8_activations=False";
  m.def(("linear(" + linear + ") -> Tensor").c_str());
  m.def(("linear.out(" + linear + ", *, Tensor(a!) out) -> Tensor(a!)").c_str());
  m.def(
      "sparse_input_linear(Tensor x, Tensor rows, int outputs, Tensor? bias, Tensor? active, float threshold=0.0, "
      "str weights=\"float\") -> Tensor");
  m.def("linear_blocks(Tensor x, Tensor blocks, Tensor? bias, str weights) -> Tensor");
  m.def("quantize(Tensor w, str weights) -> Tensor");
  const std::string dequantize = "Tensor rows, str weights, int columns, ScalarType dtype";
  m.def(("dequantize(" + dequantize + ") -> Tensor").c_str());
  m.def(("dequantize.out(" + dequantize + ", *, Tensor(a!) out) -> Tensor(a!)").c_str());
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear.out", TORCH_BOX(&linear_out));
  m.impl("sparse_input_linear", TORCH_BOX(&sparse_input_linear));
  m.impl("linear_blocks", TORCH_BOX(&linear_blocks));
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("dequantize.out", TORCH_BOX(&dequantize_out));
}

}  // namespace pi2::binding
