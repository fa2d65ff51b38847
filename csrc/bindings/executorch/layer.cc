#include "bindings/executorch/layer.h"

#include <cmath>
#include <limits>
#include <string_view>

#include "pi2/kernels.h"
#include "pi2/linear.h"

namespace pi2::et {
namespace {

const char* data(const std::shared_ptr<const Bytes>& bytes) {
  return bytes == nullptr ? nullptr : bytes->memory.data();
}

// Whether this CPU's kernels prefer the predictor in blocks. Predictors of experts are contiguous: never.
bool in_blocks(const Blob& blob) {
  const bool grouped = blob.predictor == PredictorForm::kLowrankInt4 || blob.predictor == PredictorForm::kLowrankInt8;
  return grouped && blob.predictor_int8_activations && blob.experts == 0 &&
         takes_blocks(matrix_dtype(blob.predictor)) && pi2::in_blocks(blob.rank, blob.hidden) &&
         pi2::in_blocks(kPanelRows, blob.rank);
}

Predictor predictor_of(const Blob& blob, const std::shared_ptr<const Bytes>* tensors) {
  Predictor made;
  if (blob.predictor == PredictorForm::kNone) return made;
  if (blob.predictor == PredictorForm::kSignbit) {
    made.kind = Predictor::Kind::kSignbit;
    made.signbit.columns = blob.hidden;
    made.signbit.signs = data(tensors[kA]);
    made.signbit.cold = blob.cold();
    made.signbit.margin = blob.cut;
    return made;
  }
  made.kind = Predictor::Kind::kLowrank;
  LowrankArgs& args = made.lowrank;
  args.dtype = matrix_dtype(blob.predictor);
  args.hidden = blob.hidden;
  args.rank = blob.rank;
  args.cold = blob.cold();
  args.a = data(tensors[kA]);
  args.a_scale = reinterpret_cast<const float*>(data(tensors[kAScale]));
  args.b = data(tensors[kB]);
  args.b_scale = reinterpret_cast<const float*>(data(tensors[kBScale]));
  args.b_bias = reinterpret_cast<const float*>(data(tensors[kBBias]));
  args.int8_activations = blob.predictor_int8_activations;
  args.blocks = in_blocks(blob);
  args.threshold = static_cast<float>(blob.cut);
  return made;
}

// Whether all numbers are at least `least`, and finite if required.
bool are(const double* numbers, std::int64_t count, double least, bool finite) {
  for (std::int64_t e = 0; numbers != nullptr && e < count; ++e)
    if (!(numbers[e] >= least) || (finite && !std::isfinite(numbers[e]))) return false;
  return true;
}

}  // namespace

Layer::Layer(std::shared_ptr<Store> store, const Blob& blob) : store_(std::move(store)), blob_(blob) {
  store_->add(blob_);
}

Layer::~Layer() { store_->remove(blob_); }

std::shared_ptr<Layer> Layer::load(std::shared_ptr<Store> store, const Blob& blob, Problem* problem) {
  std::shared_ptr<Layer> made(new Layer(std::move(store), blob));
  const DType dtype = matrix_dtype(blob.predictor);
  const Store::Rows a{dtype, blob.rank, blob.hidden}, b{dtype, blob.cold(), blob.rank};
  const bool blocks = in_blocks(blob);
  for (std::size_t i = 0; i < kTensorNames; ++i) {
    const Store::Rows* rows = blocks && i == kA ? &a : blocks && i == kB ? &b : nullptr;
    made->tensors_[i] = made->store_->tensor(blob.tensors[i], kTensorText[i], problem, rows);
    if (*problem) return nullptr;
  }
  FfnArgs& args = made->stack_.layer;
  args = made->store_->offload().shape(blob.layer);
  args.n_hot = blob.n_hot;
  args.first = blob.first;
  args.activation = blob.activation;
  args.activation_on_up = blob.activation_on_up;
  args.shaping = blob.shaping;
  args.threshold = blob.threshold;
  args.int8_activations = blob.int8_activations;
  args.bias_gate = data(made->tensors_[kBiasGate]);
  args.bias_up = data(made->tensors_[kBiasUp]);
  args.bias_down = data(made->tensors_[kBiasDown]);
  made->stack_.predictor = predictor_of(blob, made->tensors_);
  if (blob.experts == 0) {
    args.thresholds = reinterpret_cast<const float*>(data(made->tensors_[kThresholds]));
    return made;
  }
  made->stack_.cuts = reinterpret_cast<const double*>(data(made->tensors_[kCuts]));
  made->stack_.thresholds = reinterpret_cast<const double*>(data(made->tensors_[kThresholds]));
  const bool margins = blob.predictor == PredictorForm::kSignbit;
  if (are(made->stack_.thresholds, blob.experts, 0, false) &&
      are(made->stack_.cuts, blob.experts, margins ? 0 : -std::numeric_limits<double>::infinity(), margins))
    return made;
  *problem = et::problem(Fault::kProgram, made->store_->path() + ", experts from layer " + std::to_string(blob.layer),
                         "thresholds and margins of 0 or more", "others", "Export the model again.");
  return nullptr;
}

Problem Layer::compute(const void* x, void* y, DType dtype, std::int64_t tokens, const ParallelFor& parallel,
                       CallStats* stats) {
  if (tokens == 0) return {};
  return guarded("a layer of Pi2Backend", [&]() -> Problem {
    store_->warm();
    FfnArgs args = stack_.layer;
    args.x = x;
    args.y = y;
    args.x_dtype = dtype;
    args.tokens = tokens;
    const bool dense = blob_.dense_from > 0 && tokens >= blob_.dense_from;
    const std::string wrong =
        store_->offload().ffn(blob_.layer, dense ? Predictor() : stack_.predictor, args, parallel, nullptr, stats);
    return unread(wrong);
  });
}

Problem Layer::mix(const ExpertsArgs& args, const ParallelFor& parallel, CallStats* stats) {
  if (args.tokens == 0) return {};
  return guarded("experts of Pi2Backend", [&]() -> Problem {
    store_->warm();
    const std::string wrong = stored_experts(args, stack_, store_->offload(), blob_.layer, parallel, stats);
    constexpr std::string_view kReading = "reading the neuron store: ";
    if (wrong.rfind(kReading, 0) == 0) return unread(wrong.substr(kReading.size()));
    if (wrong.empty()) return {};
    return problem(Fault::kArgument, "experts from layer " + std::to_string(blob_.layer), "a router of this model",
                   wrong, "Export the model again.");
  });
}

// `wrong`: "" or the engine's message.
Problem Layer::unread(const std::string& wrong) const {
  if (wrong.empty()) return {};
  const std::string what = (blob_.experts > 0 ? ", experts from layer " : ", layer ") + std::to_string(blob_.layer);
  return problem(Fault::kAccess, store_->path() + what, blob_.experts > 0 ? "their neurons" : "its neurons", wrong,
                 "Check the store with `torch-pi2 inspect --verify` and its device, and run it again.");
}

}  // namespace pi2::et
