// torch.ops.pi2.*: checks and translation only. Uses the LibTorch stable ABI, so the wheel survives torch upgrades.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <string>
#include <vector>

#include "pi2/ffn.h"
#include "pi2/kernels.h"
#include "pi2/memory.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Compute threads are torch's own (design D9), honouring torch.set_num_threads.
pi2::ParallelFor torch_threads() {
  pi2::ParallelFor parallel;
  parallel.threads = static_cast<int>(torch::stable::get_num_threads());
  parallel.run = [](void*, int64_t n, pi2::ParallelFor::Body body, void* context) {
    torch::stable::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(context, i);
    });
  };
  return parallel;
}

pi2::DType float_dtype(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return pi2::DType::kF32;
    case ScalarType::BFloat16: return pi2::DType::kBF16;
    case ScalarType::Half: return pi2::DType::kF16;
    default: break;
  }
  STD_TORCH_CHECK(false, "pi2: dtype of ", name,
                  ": expected float32, bfloat16 or float16, found another. Convert it first.");
  return pi2::DType::kF32;
}

void check_plain(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu(), "pi2: device of ", name, ": expected cpu, found another. Move it with .cpu().");
}

Tensor dense(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor); }

// A bias must match the bundles in dtype and length; returns its data pointer or null.
const void* bias_data(const MaybeTensor& bias, const char* name, int64_t length, const Tensor& bundles) {
  if (!bias) return nullptr;
  check_plain(*bias, name);
  STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == length, "pi2: shape of ", name, ": expected [", length,
                  "], found ", bias->dim(), " dimensions of ", bias->numel(),
                  " elements in all. Check the layer's size.");
  STD_TORCH_CHECK(bias->scalar_type() == bundles.scalar_type(), "pi2: dtype of ", name,
                  ": expected that of bundles, found another. Convert weights and biases together.");
  STD_TORCH_CHECK(bias->is_contiguous(), "pi2: layout of ", name,
                  ": expected contiguous, found strided. Call .contiguous().");
  return bias->const_data_ptr();
}

pi2::Activation activation_of(const std::string& name) {
  static const char* const names[] = {"relu", "relu2", "silu", "gelu", "gelu_tanh", "identity"};
  for (int i = 0; i < 6; ++i)
    if (name == names[i]) return static_cast<pi2::Activation>(i);
  STD_TORCH_CHECK(false, "pi2: activation: expected relu, relu2, silu, gelu, gelu_tanh or identity, found '", name,
                  "'. See torch_pi2.ops.ACTIVATIONS.");
  return pi2::Activation::kRelu;
}

void check_hidden(const Tensor& x, int64_t hidden) {
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) == hidden, "pi2: hidden size of x: expected ", hidden,
                  " (the layer's), found ", x.dim() >= 1 ? x.size(x.dim() - 1) : 0,
                  ". Pass hidden states of this model.");
}

Tensor sparse_ffn_out(const Tensor& x, const Tensor& bundles, const MaybeTensor& bias_gate, const MaybeTensor& bias_up,
                      const MaybeTensor& bias_down, const MaybeTensor& active, std::string activation,
                      bool activation_on_up, int64_t n_hot, double threshold, Tensor out) {
  check_plain(x, "x");
  check_plain(bundles, "bundles");
  check_plain(out, "out");
  STD_TORCH_CHECK(bundles.dim() == 3 && (bundles.size(1) == 2 || bundles.size(1) == 3) && bundles.is_contiguous(),
                  "pi2: bundles: expected contiguous [neurons, 3 (gate, up, down) or 2 (up, down), hidden], found ",
                  bundles.dim(), " dimensions. Build them with torch_pi2.runtime.ffn.");
  pi2::FfnArgs args;
  args.neurons = bundles.size(0);
  args.rows = bundles.size(1);
  args.hidden = bundles.size(2);
  check_hidden(x, args.hidden);
  STD_TORCH_CHECK(args.hidden > 0 && args.neurons > 0,
                  "pi2: bundles: expected neurons, found an empty tensor. Check the layer.");
  STD_TORCH_CHECK(n_hot >= 0 && n_hot <= args.neurons, "pi2: n_hot: expected 0 to ", args.neurons, ", found ", n_hot,
                  ". Check the plan.");
  STD_TORCH_CHECK(threshold >= 0, "pi2: threshold: expected 0 or more, found ", threshold, ". Check the plan.");
  STD_TORCH_CHECK(out.scalar_type() == x.scalar_type() && out.numel() == x.numel() && out.is_contiguous(),
                  "pi2: out: expected a contiguous tensor with x's dtype and ", x.numel(), " elements, found ",
                  out.numel(), ". Use torch.empty_like(x).");
  args.x_dtype = float_dtype(x, "x");
  args.w_dtype = float_dtype(bundles, "bundles");
  args.bias_gate = bias_data(bias_gate, "bias_gate", args.neurons, bundles);
  args.bias_up = bias_data(bias_up, "bias_up", args.neurons, bundles);
  args.bias_down = bias_data(bias_down, "bias_down", args.hidden, bundles);
  args.tokens = x.numel() / args.hidden;
  const Tensor x_dense = dense(x);
  std::optional<Tensor> active_dense;
  if (active) {
    check_plain(*active, "active");
    STD_TORCH_CHECK(active->scalar_type() == ScalarType::Bool,
                    "pi2: dtype of active: expected bool, found another. Use .bool().");
    STD_TORCH_CHECK(active->numel() == args.tokens * (args.neurons - n_hot), "pi2: shape of active: expected ",
                    args.tokens, " tokens x ", args.neurons - n_hot, " cold neurons, found ", active->numel(),
                    " elements. It covers cold neurons only, one row per token of x.");
    active_dense = dense(*active);
    args.active = static_cast<const uint8_t*>(active_dense->const_data_ptr());
  }
  args.x = x_dense.const_data_ptr();
  args.y = out.mutable_data_ptr();
  args.bundles = bundles.const_data_ptr();
  args.n_hot = n_hot;
  args.activation = activation_of(activation);
  args.activation_on_up = activation_on_up;
  args.threshold = static_cast<float>(threshold);
  if (args.tokens > 0) pi2::sparse_ffn(args, torch_threads());
  return out;
}

Tensor sparse_ffn(const Tensor& x, const Tensor& bundles, const MaybeTensor& bias_gate, const MaybeTensor& bias_up,
                  const MaybeTensor& bias_down, const MaybeTensor& active, std::string activation,
                  bool activation_on_up, int64_t n_hot, double threshold) {
  Tensor out = torch::stable::new_empty(x, x.sizes());
  sparse_ffn_out(x, bundles, bias_gate, bias_up, bias_down, active, activation, activation_on_up, n_hot, threshold,
                 out);
  return out;
}

const void* typed_data(const Tensor& tensor, const char* name, ScalarType dtype, int64_t rows, int64_t columns) {
  check_plain(tensor, name);
  const int64_t found = tensor.dim() == 2 ? tensor.size(1) : 0;
  STD_TORCH_CHECK(tensor.scalar_type() == dtype && tensor.is_contiguous() && tensor.dim() == (columns > 0 ? 2 : 1) &&
                      tensor.size(0) == rows && (columns == 0 || found == columns),
                  "pi2: predictor tensor ", name, ": expected contiguous ", columns > 0 ? "int8 " : "float32 ", rows,
                  " x ", columns > 0 ? columns : 1, ", found ", tensor.numel(),
                  " elements of another shape or dtype. Fit the predictor again.");
  return tensor.const_data_ptr();
}

Tensor predict_lowrank(const Tensor& x, const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                       const MaybeTensor& b_bias, double threshold) {
  check_plain(x, "x");
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2, "pi2: predictor tensors a and b: expected 2 dimensions each, found ",
                  a.dim(), " and ", b.dim(), ". Fit the predictor again.");
  pi2::LowrankArgs args;
  args.rank = a.size(0);
  args.hidden = a.size(1);
  args.cold = b.size(0);
  check_hidden(x, args.hidden);
  args.a = static_cast<const int8_t*>(typed_data(a, "a", ScalarType::Char, args.rank, args.hidden));
  args.a_scale = static_cast<const float*>(typed_data(a_scale, "a_scale", ScalarType::Float, args.rank, 0));
  args.b = static_cast<const int8_t*>(typed_data(b, "b", ScalarType::Char, args.cold, args.rank));
  args.b_scale = static_cast<const float*>(typed_data(b_scale, "b_scale", ScalarType::Float, args.cold, 0));
  if (b_bias) args.b_bias = static_cast<const float*>(typed_data(*b_bias, "b_bias", ScalarType::Float, args.cold, 0));
  args.threshold = static_cast<float>(threshold);
  args.x_dtype = float_dtype(x, "x");
  args.tokens = x.numel() / args.hidden;
  std::vector<int64_t> shape;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) shape.push_back(x.size(d));
  shape.push_back(args.cold);
  Tensor active = torch::stable::new_empty(x, shape, ScalarType::Bool);
  const Tensor x_dense = dense(x);
  args.x = x_dense.const_data_ptr();
  args.active = static_cast<uint8_t*>(active.mutable_data_ptr());
  if (args.tokens > 0 && args.cold > 0) pi2::predict_lowrank(args, torch_threads());
  return active;
}

int64_t read_bundles(const Tensor& bundles, const MaybeTensor& index) {
  check_plain(bundles, "bundles");
  STD_TORCH_CHECK(bundles.is_contiguous() && bundles.dim() >= 1 && bundles.size(0) > 0,
                  "pi2: bundles: expected a contiguous, non-empty tensor, found another. Call .contiguous().");
  const int64_t element = bundles.element_size();
  const int64_t bytes = bundles.numel() / bundles.size(0) * element;
  if (!index)
    return static_cast<int64_t>(
        pi2::read_bundles(bundles.const_data_ptr(), bytes, bundles.size(0), nullptr, torch_threads()));
  check_plain(*index, "index");
  STD_TORCH_CHECK(index->scalar_type() == ScalarType::Long && index->dim() == 1 && index->is_contiguous(),
                  "pi2: index: expected a contiguous int64 vector, found another. Use torch.nonzero(...).flatten().");
  const auto* ids = static_cast<const int64_t*>(index->const_data_ptr());
  for (int64_t i = 0; i < index->size(0); ++i)
    STD_TORCH_CHECK(ids[i] >= 0 && ids[i] < bundles.size(0), "pi2: index: expected 0 to ", bundles.size(0) - 1,
                    ", found ", ids[i], ". Check the neuron ids.");
  return static_cast<int64_t>(pi2::read_bundles(bundles.const_data_ptr(), bytes, index->size(0), ids, torch_threads()));
}

bool advise_huge_pages(const Tensor& tensor) {
  return pi2::advise_huge_pages(tensor.mutable_data_ptr(), tensor.numel() * tensor.element_size());
}

// [calls, tokens, neurons, gate_rows, up_rows, down_rows, dense_rows] since the last reset.
Tensor counters(bool reset) {
  const pi2::Counters c = pi2::read_counters();
  if (reset) pi2::reset_counters();
  Tensor out = torch::stable::empty({7}, ScalarType::Long);
  auto* values = static_cast<int64_t*>(out.mutable_data_ptr());
  const int64_t all[] = {c.calls, c.tokens, c.neurons, c.gate_rows, c.up_rows, c.down_rows, c.dense_rows};
  for (int i = 0; i < 7; ++i) values[i] = all[i];
  return out;
}

// Names of the kernel tables this CPU can run, best last, comma-separated; then ':' and the one in use.
std::string kernel_tables() {
  int count = 0;
  const pi2::KernelTable* const* tables = pi2::available_kernels(&count);
  std::string names;
  for (int i = 0; i < count; ++i) names += std::string(i ? "," : "") + tables[i]->isa;
  return names + ":" + pi2::kernels().isa;
}

bool select_kernels(std::string isa) { return pi2::select_kernels(isa.c_str()); }

}  // namespace

STABLE_TORCH_LIBRARY(pi2, m) {
  const std::string ffn =
      "Tensor x, Tensor bundles, Tensor? bias_gate, Tensor? bias_up, Tensor? bias_down, Tensor? active, str activation, "
      "bool activation_on_up, int n_hot, float threshold";
  m.def(("sparse_ffn(" + ffn + ") -> Tensor").c_str());
  m.def(("sparse_ffn.out(" + ffn + ", *, Tensor(a!) out) -> Tensor(a!)").c_str());
  m.def(
      "predict_lowrank(Tensor x, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? b_bias, float threshold) -> Tensor");
  m.def("read_bundles(Tensor bundles, Tensor? index) -> int");
  m.def("advise_huge_pages(Tensor tensor) -> bool");
  m.def("counters(bool reset) -> Tensor");
  m.def("kernel_tables() -> str");
  m.def("select_kernels(str isa) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CPU, m) {
  m.impl("sparse_ffn", TORCH_BOX(&sparse_ffn));
  m.impl("sparse_ffn.out", TORCH_BOX(&sparse_ffn_out));
  m.impl("predict_lowrank", TORCH_BOX(&predict_lowrank));
  m.impl("read_bundles", TORCH_BOX(&read_bundles));
  m.impl("advise_huge_pages", TORCH_BOX(&advise_huge_pages));
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CompositeExplicitAutograd, m) {
  m.impl("counters", TORCH_BOX(&counters));
  m.impl("kernel_tables", TORCH_BOX(&kernel_tables));
  m.impl("select_kernels", TORCH_BOX(&select_kernels));
}
