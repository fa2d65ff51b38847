// torch.ops.pi2.step_program, step_run and step_close; torch_pi2/decode/step_program.py makes programs.
#include "pi2/step_program.h"

#include <array>
#include <map>

#include "bindings/torch/common.h"

namespace pi2::binding {
namespace {

// PyTorch's operators that programs call: they have no exact rounding, so that PyTorch's own code has to compute them.
// step_program.py has the same list. gelu is not among them: torch 2.13 loses the memory of each text that it is
// passed.
constexpr const char* kCalled[] = {"aten::silu", "aten::sigmoid", "aten::tanh", "aten::exp",
                                   "aten::relu", "aten::sqrt",    "aten::cos",  "aten::sin"};

int64_t bytes_of(const Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) == 0) return 0;
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return (last + 1) * tensor.element_size();
}

struct Like {
  ScalarType dtype;
  std::vector<int64_t> sizes, strides;

  explicit Like(const Tensor& tensor) : dtype(tensor.scalar_type()) {
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      sizes.push_back(tensor.size(d));
      strides.push_back(tensor.stride(d));
    }
  }
  bool is(const Tensor& tensor) const {
    bool same = tensor.dim() == static_cast<int64_t>(sizes.size()) && tensor.scalar_type() == dtype && tensor.is_cpu();
    for (size_t d = 0; same && d < sizes.size(); ++d) {
      const auto dim = static_cast<int64_t>(d);  // where there is one number, any stride will do
      same = tensor.size(dim) == sizes[d] && (sizes[d] == 1 || tensor.stride(dim) == strides[d]);
    }
    return same;
  }
};

struct Step {
  std::unique_ptr<StepProgram> program;
  std::vector<Tensor> fixed;
  std::vector<Like> like_fixed, inputs, outputs;
};

std::mutex steps_mutex;
std::map<int64_t, std::shared_ptr<Step>>& steps() {
  static auto* const all = new std::map<int64_t, std::shared_ptr<Step>>();  // never destroyed: threads may still run
  return *all;
}

int64_t step_program(std::vector<Tensor> fixed, std::vector<Tensor> inputs, std::vector<Tensor> outputs,
                     std::vector<int64_t> own_bytes, const Tensor& code) {
  STD_TORCH_CHECK(code.scalar_type() == ScalarType::Long && code.dim() == 1 && code.is_contiguous() && code.is_cpu(),
                  "pi2: code: expected contiguous int64 [words], found ", shape_of(code), ". See step_program.py.");
  const auto step = std::make_shared<Step>();
  std::vector<int64_t> bytes;
  for (const auto* tensors : {&fixed, &inputs, &outputs})
    for (const Tensor& tensor : *tensors) {
      check_plain(tensor, "slots");
      STD_TORCH_CHECK(tensors != &outputs || tensor.is_contiguous(),
                      "pi2: outputs: expected contiguous, found strided ", shape_of(tensor), ". Pass storages.");
      bytes.push_back(bytes_of(tensor));
      (tensors == &fixed ? step->like_fixed : tensors == &inputs ? step->inputs : step->outputs).emplace_back(tensor);
    }
  const auto given = static_cast<int64_t>(bytes.size());
  bytes.insert(bytes.end(), own_bytes.begin(), own_bytes.end());
  std::string reason;
  step->program = StepProgram::make(static_cast<const int64_t*>(code.const_data_ptr()), code.numel(), bytes, given,
                                    std::size(kCalled), &reason);
  STD_TORCH_CHECK(step->program != nullptr, "pi2: code: expected a sound program, found a fault in ", reason,
                  ". Run the recorded calls instead.");
  step->fixed = std::move(fixed);
  const std::lock_guard<std::mutex> lock(steps_mutex);
  static int64_t next = 1;
  steps()[next] = step;
  return next++;
}

void call(void*, int64_t number, Element element, const void* x, void* y, int64_t count) {
  const ScalarType dtype = element == Element::kF32    ? ScalarType::Float
                           : element == Element::kBF16 ? ScalarType::BFloat16
                                                       : ScalarType::Half;
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  const std::array<int64_t, 1> size{count}, stride{1};
  const Tensor input = torch::stable::from_blob(const_cast<void*>(x), size, stride, cpu, dtype);
  const Tensor out = torch::stable::from_blob(y, size, stride, cpu, dtype);
  std::array<StableIValue, 2> stack{torch::stable::detail::from(input), torch::stable::detail::from(out)};
  const char* name = kCalled[static_cast<size_t>(number)];
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "out", stack.data(), TORCH_ABI_VERSION));
  (void)torch::stable::detail::to<Tensor>(stack[0]);  // the result's handle is ours
}

std::vector<Tensor> step_run(int64_t number, std::vector<Tensor> inputs) {
  std::shared_ptr<Step> step;
  {
    const std::lock_guard<std::mutex> lock(steps_mutex);
    const auto found = steps().find(number);
    STD_TORCH_CHECK(found != steps().end(), "pi2: program: expected one that was made, found number ", number,
                    ", which has been closed or never was. Record the step again.");
    step = found->second;
  }
  STD_TORCH_CHECK(inputs.size() == step->inputs.size(), "pi2: inputs: expected ", step->inputs.size(), ", found ",
                  inputs.size(), ". Pass those of the recorded step.");
  std::vector<char*> given;
  for (size_t i = 0; i < step->fixed.size(); ++i) {
    STD_TORCH_CHECK(step->like_fixed[i].is(step->fixed[i]),
                    "pi2: program: expected tensors of the model as they were, found one with another shape or dtype. ",
                    "Record the step again.");
    given.push_back(static_cast<char*>(step->fixed[i].mutable_data_ptr()));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    STD_TORCH_CHECK(step->inputs[i].is(inputs[i]),
                    "pi2: inputs: expected the shape, strides and dtype of the recorded ", "step, found ",
                    shape_of(inputs[i]), ". Record the step again.");
    given.push_back(static_cast<char*>(inputs[i].mutable_data_ptr()));
  }
  std::vector<Tensor> outputs;
  for (const Like& like : step->outputs) {
    outputs.push_back(torch::stable::empty(like.sizes, like.dtype));
    given.push_back(static_cast<char*>(outputs.back().mutable_data_ptr()));
  }
  const bool complete = step->program->run(given, torch_threads(), call, nullptr);
  STD_TORCH_CHECK(complete,
                  "pi2: index: expected tokens of the vocabulary and positions within the cache, found one beyond it. ",
                  "Make a longer cache.");
  return outputs;
}

bool step_close(int64_t number) {
  std::shared_ptr<Step> last;  // destroyed after the lock is given back
  const std::lock_guard<std::mutex> lock(steps_mutex);
  const auto found = steps().find(number);
  if (found == steps().end()) return false;
  last = std::move(found->second);
  steps().erase(found);
  return true;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pi2, m) {
  m.def("step_program(Tensor[] fixed, Tensor[] inputs, Tensor[] outputs, int[] own_bytes, Tensor code) -> int");
  m.def("step_run(int program, Tensor[] inputs) -> Tensor[]");
  m.def("step_close(int program) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CompositeExplicitAutograd, m) {
  m.impl("step_program", TORCH_BOX(&step_program));
  m.impl("step_run", TORCH_BOX(&step_run));
  m.impl("step_close", TORCH_BOX(&step_close));
}

}  // namespace pi2::binding
