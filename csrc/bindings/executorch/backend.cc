// Pi2Backend: feed-forward layers over a neuron store, as delegates of a .pte (docs/FORMATS.md, "Delegate blob").
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/event_tracer_hooks_delegate.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>

#include <cstring>

#include "bindings/executorch/layer.h"
#include "bindings/executorch/session.h"
#include "bindings/executorch/threads.h"
#include "pi2/executorch.h"

namespace pi2::et {
namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::ArrayRef;
using executorch::runtime::BackendExecutionContext;
using executorch::runtime::BackendInitContext;
using executorch::runtime::BackendInterface;
using executorch::runtime::BackendOption;
using executorch::runtime::BackendOptionContext;
using executorch::runtime::CompileSpec;
using executorch::runtime::DelegateHandle;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::FreeableBuffer;
using executorch::runtime::kMaxOptionValueLength;
using executorch::runtime::Result;
using executorch::runtime::Span;

// Figures of one call, for profiles.
struct Figures {
  std::int64_t tokens = 0;
  CallStats stats;
  std::int64_t submit_wait_ns = 0;
};

// One delegate call of a loaded method.
struct Handle {
  Blob blob;
  std::shared_ptr<Layer> layer;      // roles whole and submit
  std::shared_ptr<Session> session;  // roles submit and collect
  std::string event;                 // its name in profiles
};

Error error_of(Fault fault) {
  switch (fault) {
    case Fault::kNone: return Error::Ok;
    case Fault::kProgram: return Error::InvalidProgram;
    case Fault::kIncompatible: return Error::DelegateInvalidCompatibility;
    case Fault::kAccess: return Error::AccessFailed;
    case Fault::kArgument: return Error::InvalidArgument;
    case Fault::kState: return Error::InvalidState;
    case Fault::kMemory: return Error::MemoryAllocationFailed;
  }
  return Error::Internal;
}

Error told(const Problem& problem) noexcept {
  remember(problem);
  ET_LOG(Error, "Pi2Backend: %s", problem.text.c_str());
  return error_of(problem.fault);
}

Options options_of(Span<const BackendOption> given) {
  Options out;
  for (const BackendOption& option : given) {
    std::string value;
    if (const bool* yes = std::get_if<bool>(&option.value)) value = *yes ? "true" : "false";
    if (const int* n = std::get_if<int>(&option.value)) value = std::to_string(*n);
    if (const auto* text = std::get_if<std::array<char, kMaxOptionValueLength>>(&option.value))
      value = std::string(text->data(), strnlen(text->data(), text->size()));
    out[std::string(option.key, strnlen(option.key, sizeof(option.key)))] = value;
  }
  return out;
}

Problem load(BackendInitContext& context, const void* data, std::size_t bytes, Handle* handle) {
  Problem problem = parse_blob(data, bytes, &handle->blob);
  if (problem) return problem;
  const Blob& blob = handle->blob;
  Settings settings;
  problem = current_settings(options_of(context.runtime_specs()), &settings);
  if (problem) return problem;
  const std::shared_ptr<Store> store = Store::open(blob, settings, &problem);
  if (problem) return problem;
  constexpr const char* kEvents[] = {"pi2_ffn", "pi2_submit", "pi2_collect"};
  const char* event = blob.experts > 0 ? "pi2_experts" : kEvents[static_cast<int>(blob.role)];
  handle->event = std::string(event) + "." + std::to_string(blob.layer);
  if (blob.role != Role::kCollect) handle->layer = Layer::load(store, blob, &problem);
  if (problem || blob.role == Role::kWhole) return problem;
  const char* method = context.get_method_name();
  handle->session =
      Session::of(context.get_runtime_allocator(), method == nullptr ? "" : method, blob, store, &problem);
  if (problem) return problem;
  if (blob.role == Role::kSubmit) handle->session->attach(handle->layer, executorch_threads().threads);
  return {};
}

Problem dtype_of(const Tensor& tensor, const std::string& what, DType* dtype) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: *dtype = DType::kF32; return {};
    case ScalarType::BFloat16: *dtype = DType::kBF16; return {};
    case ScalarType::Half: *dtype = DType::kF16; return {};
    default:
      return problem(Fault::kArgument, what, "float32, bfloat16 or float16",
                     "dtype " + std::to_string(static_cast<int>(tensor.scalar_type())), "Export the model again.");
  }
}

// Checks x or the result of a call: contiguous, a dtype of the core, [..., hidden].
Problem check(const Handle& handle, const Tensor& x, const char* name, DType* dtype) {
  const Blob& blob = handle.blob;
  const std::string what = handle.event + ", " + name;
  constexpr const char* kFix = "Export the model again.";
  const Problem unknown = dtype_of(x, what, dtype);
  if (unknown) return unknown;
  if (x.dim() < 1 || x.size(x.dim() - 1) != blob.hidden)
    return problem(Fault::kArgument, what, "[..., " + std::to_string(blob.hidden) + "]",
                   "a last size of " + std::to_string(x.dim() < 1 ? 0 : x.size(x.dim() - 1)), kFix);
  for (std::size_t d = 0; d < static_cast<std::size_t>(x.dim()); ++d)
    if (x.dim_order()[d] != d) return problem(Fault::kArgument, what, "a contiguous tensor", "another order", kFix);
  return {};
}

// The inputs from a router: experts and weights of each token, both [tokens, slots].
Problem route(const Handle& handle, const Tensor& index, const Tensor& routing, ExpertsArgs* args) {
  constexpr const char* kFix = "Export the model again.";
  const auto sizes = [](const Tensor& tensor) {
    return tensor.dim() != 2 ? "another shape"
                             : std::to_string(tensor.size(0)) + " x " + std::to_string(tensor.size(1));
  };
  if (index.scalar_type() != ScalarType::Long || index.dim() != 2 || index.size(0) != args->tokens)
    return problem(Fault::kArgument, handle.event + ", index", std::to_string(args->tokens) + " x slots of int64",
                   sizes(index), kFix);
  if (sizes(routing) != sizes(index))
    return problem(Fault::kArgument, handle.event + ", routing", sizes(index), sizes(routing), kFix);
  for (const Tensor* tensor : {&index, &routing})
    if (tensor->dim_order()[0] != 0)
      return problem(Fault::kArgument, handle.event, "contiguous tensors of a router", "another order", kFix);
  args->index = index.const_data_ptr<std::int64_t>();
  args->routing = routing.const_data_ptr();
  args->slots = index.size(1);
  return dtype_of(routing, handle.event + ", routing", &args->routing_dtype);
}

// In the form that torch_pi2.export.etdump reads; empty for submit, which only starts the layer.
std::string metadata_of(const Handle& handle, const Figures& figures) {
  if (handle.blob.role == Role::kSubmit) return "";
  const std::pair<const char*, std::int64_t> numbers[] = {
      {"tokens", figures.tokens},
      {"wanted", figures.stats.wanted},
      {"hits", figures.stats.hits},
      {"reads", figures.stats.reads},
      {"bytes_read", figures.stats.bytes_read},
      {"wait_ns", figures.stats.wait_ns},
      {"submit_wait_ns", figures.submit_wait_ns},
  };
  std::string out = "{\"pi2\": 1";
  for (const auto& [name, value] : numbers) out += std::string(", \"") + name + "\": " + std::to_string(value);
  return out + "}";
}

Problem run(const Handle& handle, Span<EValue*> args, Figures* figures) {
  const bool mixture = handle.blob.experts > 0;
  const std::size_t count = mixture ? 4 : 2;
  bool tensors = args.size() == count;
  for (EValue* value : args) tensors = tensors && value->isTensor();
  if (!tensors)
    return problem(Fault::kArgument, handle.event, mixture ? "three tensors and the result" : "a tensor and its result",
                   std::to_string(args.size()) + " values", "Export the model again.");
  const Tensor x = args[0]->toTensor();
  Tensor out = args[count - 1]->toTensor();
  DType dtype = DType::kF32, out_dtype = DType::kF32;
  Problem wrong = check(handle, x, "input", &dtype);
  if (wrong) return wrong;
  if (executorch::runtime::resize_tensor(out, x.sizes()) != Error::Ok)
    return problem(Fault::kArgument, handle.event + ", result", "room for " + std::to_string(x.numel()) + " numbers",
                   "less", "Export the model for more tokens.");
  wrong = check(handle, out, "result", &out_dtype);
  if (wrong) return wrong;
  if (dtype != out_dtype)
    return problem(Fault::kArgument, handle.event + ", result", "the dtype of its input", "another",
                   "Export the model again.");
  const std::int64_t tokens = figures->tokens = x.numel() / handle.blob.hidden;
  CallStats* const stats = &figures->stats;
  const void* from = x.const_data_ptr();
  void* to = out.mutable_data_ptr();
  if (mixture) {
    ExpertsArgs routed{from, to, dtype, tokens, handle.blob.hidden};
    routed.experts = handle.blob.experts;
    wrong = route(handle, args[1]->toTensor(), args[2]->toTensor(), &routed);
    return wrong ? wrong : handle.layer->mix(routed, executorch_threads(), stats);
  }
  if (handle.blob.role == Role::kWhole)
    return handle.layer->compute(from, to, dtype, tokens, executorch_threads(), stats);
  if (handle.blob.role == Role::kCollect)
    return handle.session->collect(from, to, dtype, tokens, stats, &figures->submit_wait_ns);
  wrong = handle.session->submit(from, dtype, tokens);
  if (!wrong && to != from) std::memmove(to, from, x.nbytes());
  return wrong;
}

class Pi2Backend final : public BackendInterface {
 public:
  bool is_available() const override { return true; }

  Result<DelegateHandle*> init(BackendInitContext& context, FreeableBuffer* processed,
                               ArrayRef<CompileSpec>) const override {
    std::unique_ptr<Handle> handle;
    const Problem wrong = guarded("loading a layer", [&] {
      handle = std::make_unique<Handle>();
      return load(context, processed->data(), processed->size(), handle.get());
    });
    processed->Free();
    if (wrong) return told(wrong);
    return static_cast<DelegateHandle*>(handle.release());
  }

  Error execute(BackendExecutionContext& context, DelegateHandle* raw, Span<EValue*> args) const override {
    const auto& handle = *static_cast<const Handle*>(raw);
    const auto entry = executorch::runtime::event_tracer_start_profiling_delegate(
        context.event_tracer(), handle.event.c_str(), executorch::runtime::kUnsetDelegateDebugIntId);
    Figures figures;
    std::string metadata;
    const Problem wrong = guarded(handle.event.c_str(), [&] {
      Problem problem = run(handle, args, &figures);
      if (context.event_tracer() != nullptr) metadata = metadata_of(handle, figures);
      return problem;
    });
    executorch::runtime::event_tracer_end_profiling_delegate(
        context.event_tracer(), entry, metadata.empty() ? nullptr : metadata.data(), metadata.size());
    return wrong ? told(wrong) : Error::Ok;
  }

  Error set_option(BackendOptionContext&, const Span<BackendOption>& given) override {
    const Problem wrong = guarded("setting options", [&] {
      for (const auto& [key, value] : options_of(Span<const BackendOption>(given.data(), given.size()))) {
        Problem one = pi2::et::set_option(key, value);
        if (one) return one;
      }
      return Problem();
    });
    return wrong ? told(wrong) : Error::Ok;
  }

  void destroy(DelegateHandle* raw) const override { delete static_cast<Handle*>(raw); }
};

// If a process loads two copies of this library, the first is used; ExecuTorch then logs a harmless error.
const Error registered = [] {
  static Pi2Backend backend;
  return executorch::runtime::register_backend({"Pi2Backend", &backend});
}();

}  // namespace
}  // namespace pi2::et

extern "C" int pi2_et_share_weights(int share) {
  executorch::runtime::BackendOptions<1> options;
  executorch::runtime::Error error = options.set_option("weight_cache_enabled", share != 0);
  if (error == executorch::runtime::Error::Ok)
    error = executorch::runtime::set_option("XnnpackBackend", options.view());
  if (error == executorch::runtime::Error::Ok) return 0;
  pi2::et::remember(pi2::et::guarded("sharing of packed weights", [] {
    return pi2::et::problem(pi2::et::Fault::kState, "sharing of packed weights",
                            "ExecuTorch's XNNPACK backend in this process", "none", "Load it first.");
  }));
  return -1;
}
