// Shared by operators for ExecuTorch: argument checks, error reports, registration.
#pragma once

#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>

#include <cstring>
#include <optional>
#include <string>

#include "bindings/executorch/fault.h"
#include "pi2/types.h"

namespace pi2::et {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;
using MaybeTensor = std::optional<Tensor>;

// Thrown by a check; ends the operator.
struct Refused {
  std::string what, expected, found;
};

inline std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (executorch::aten::SizesType d = 0; d < tensor.dim(); ++d)
    text += (d == 0 ? "" : ", ") + std::to_string(tensor.size(d));
  return text + "]";
}

inline void expect(bool sound, const char* what, const std::string& expected, const std::string& found) {
  if (!sound) throw Refused{what, expected, found};
}

inline DType float_dtype(const Tensor& tensor, const char* what) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return DType::kF32;
    case ScalarType::BFloat16: return DType::kBF16;
    case ScalarType::Half: return DType::kF16;
    default: throw Refused{what, "float32, bfloat16 or float16", "another dtype"};
  }
}

// Runs `body`, reports every failure to ExecuTorch and throws none into it.
template <class Body>
void guarded(KernelRuntimeContext& context, const char* op, const Body& body) {
  const Problem wrong = et::guarded(op, [&] {
    try {
      body();
    } catch (const Refused& r) {
      return problem(Fault::kArgument, std::string(op) + ", " + r.what, r.expected, r.found, "Export the model again.");
    }
    return Problem();
  });
  if (!wrong) return;
  remember(wrong);
  ET_LOG(Error, "%s", wrong.text.c_str());
  context.fail(wrong.fault == Fault::kMemory ? Error::MemoryAllocationFailed : Error::InvalidArgument);
}

// A second registration of an operator would end the process, so this skips operators that another copy of this library
// has registered. (registry_has_op_function would tell, but logs an error if it has not.)
template <class Function>
Error add(const char* name, Function function) {
  for (const auto& kernel : executorch::runtime::get_registered_kernels())
    if (std::strcmp(kernel.name_, name) == 0) return Error::Ok;
  return executorch::runtime::register_kernel(executorch::extension::make_boxed_kernel(name, function));
}

}  // namespace pi2::et
