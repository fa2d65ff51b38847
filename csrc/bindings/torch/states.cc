// torch.ops.pi2.recurrence, conv_step.
#include "pi2/states.h"

#include "bindings/torch/common.h"

namespace pi2::binding {
namespace {

void check_shape(const Tensor& tensor, const char* name, const std::vector<int64_t>& shape, ScalarType dtype) {
  check_plain(tensor, name);
  bool same = tensor.dim() == static_cast<int64_t>(shape.size()) && tensor.scalar_type() == dtype;
  std::string expected;
  for (size_t d = 0; d < shape.size(); ++d) {
    same = same && tensor.size(d) == shape[d];
    expected += (d == 0 ? "" : ", ") + std::to_string(shape[d]);
  }
  STD_TORCH_CHECK(same, "pi2: ", name, ": expected [", expected, "] in the dtype of the other tensors, found ",
                  shape_of(tensor), " in this or another one. Pass one token of each sequence.");
}

void check_state(const Tensor& state, int64_t dim) {
  check_plain(state, "state");
  STD_TORCH_CHECK(state.dim() == dim && state.numel() > 0 && state.is_contiguous(), "pi2: state: expected ", dim,
                  " dimensions, not empty and contiguous, found ", shape_of(state),
                  ". Pass the state of a layer, which is changed.");
}

Tensor recurrence(const Tensor& state, const Tensor& decay, const Tensor& v, const Tensor& k, const Tensor& r,
                  const MaybeTensor& a, const MaybeTensor& b, bool transposed) {
  check_state(state, 4);
  RecurrenceArgs args;
  args.transposed = transposed;
  args.batch = state.size(0);
  args.heads = state.size(1);
  args.rows = state.size(transposed ? 3 : 2);
  args.width = state.size(transposed ? 2 : 3);
  const ScalarType dtype = ScalarType::Float;
  check_shape(state, "state", {args.batch, args.heads, state.size(2), state.size(3)}, dtype);
  check_shape(v, "v", {args.batch, args.heads, args.rows}, dtype);
  args.groups = k.dim() == 3 ? k.size(1) : 0;
  STD_TORCH_CHECK(args.groups > 0 && args.heads % args.groups == 0, "pi2: k: expected [sequences, groups, width] with ",
                  "groups that divide the ", args.heads, " heads, found ", shape_of(k),
                  ". Pass keys that groups of heads share.");
  check_shape(k, "k", {args.batch, args.groups, args.width}, dtype);
  check_shape(r, "r", {args.batch, args.groups, args.width}, dtype);
  args.one_decay = decay.dim() == 3 && decay.size(2) == 1;
  check_shape(decay, "decay", {args.batch, args.heads, args.one_decay ? 1 : args.width}, dtype);
  STD_TORCH_CHECK(a.has_value() == b.has_value(), "pi2: a, b: expected both or none, found one. Pass both.");
  const Tensor all[] = {dense(decay), dense(v), dense(k), dense(r), a ? dense(*a) : v, b ? dense(*b) : v};
  const float* data[6];
  for (int i = 0; i < 6; ++i) data[i] = static_cast<const float*>(all[i].const_data_ptr());
  args.decay = data[0];
  args.v = data[1];
  args.k = data[2];
  args.r = data[3];
  if (a) {
    check_shape(*a, "a", {args.batch, args.heads, args.width}, dtype);
    check_shape(*b, "b", {args.batch, args.heads, args.width}, dtype);
    args.a = data[4];
    args.b = data[5];
  }
  args.state = static_cast<float*>(state.mutable_data_ptr());
  Tensor y = torch::stable::new_empty(v, {args.batch, args.heads, args.rows});
  args.y = static_cast<float*>(y.mutable_data_ptr());
  pi2::recurrence(args, torch_threads());
  return y;
}

Tensor conv_step(const Tensor& x, const Tensor& state, const Tensor& weight, const MaybeTensor& bias, bool silu) {
  check_state(state, 3);
  ConvStepArgs args;
  args.dtype = float_dtype(x, "x");
  args.batch = state.size(0);
  args.channels = state.size(1);
  args.length = state.size(2);
  args.taps = weight.dim() == 2 ? weight.size(1) : 0;
  args.silu = silu;
  STD_TORCH_CHECK(args.taps > 0 && args.taps <= args.length + 1, "pi2: weight: expected [channels, taps] of at most ",
                  args.length + 1, " taps for state ", shape_of(state), ", found ", shape_of(weight),
                  ". Pass the convolution of this state.");
  check_shape(x, "x", {args.batch, args.channels}, x.scalar_type());
  check_shape(state, "state", {args.batch, args.channels, args.length}, x.scalar_type());
  check_shape(weight, "weight", {args.channels, args.taps}, x.scalar_type());
  if (bias) check_shape(*bias, "bias", {args.channels}, x.scalar_type());
  const Tensor x_dense = dense(x), weight_dense = dense(weight), bias_dense = bias ? dense(*bias) : x_dense;
  args.x = x_dense.const_data_ptr();
  args.weight = weight_dense.const_data_ptr();
  args.bias = bias ? bias_dense.const_data_ptr() : nullptr;
  args.state = state.mutable_data_ptr();
  Tensor y = torch::stable::new_empty(x, {args.batch, args.channels});
  args.y = y.mutable_data_ptr();
  pi2::conv_step(args, torch_threads());
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pi2, m) {
  m.def(
      "recurrence(Tensor(a!) state, Tensor decay, Tensor v, Tensor k, Tensor r, Tensor? a=None, Tensor? b=None, "
      "bool transposed=False) -> Tensor");
  m.def("conv_step(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, bool silu) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CPU, m) {
  m.impl("recurrence", TORCH_BOX(&recurrence));
  m.impl("conv_step", TORCH_BOX(&conv_step));
}

}  // namespace pi2::binding
