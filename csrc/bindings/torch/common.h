// Shared by all operators of torch.ops.pi2: torch's threads, checks of tensors and names. The bindings only check and
// translate. They use the LibTorch stable ABI, so that the wheel survives torch upgrades.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/formats.h"
#include "pi2/types.h"

namespace pi2::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// A `str` argument of an operator. For std::string, torch's headers (2.13) leak a copy with each call.
struct Text : std::string {
  using std::string::string;
};

// Compute threads are torch's own (design D9), honouring torch.set_num_threads.
inline ParallelFor torch_threads() {
  ParallelFor parallel;
  parallel.threads = static_cast<int>(torch::stable::get_num_threads());
  parallel.run = [](void*, int64_t n, ParallelFor::Body body, void* context) {
    torch::stable::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(context, i);
    });
  };
  return parallel;
}

// The float type of a tensor of activations.
inline DType float_dtype(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return DType::kF32;
    case ScalarType::BFloat16: return DType::kBF16;
    case ScalarType::Half: return DType::kF16;
    default: break;
  }
  STD_TORCH_CHECK(false, "pi2: dtype of ", name,
                  ": expected float32, bfloat16 or float16, found another. Convert it first.");
  return DType::kF32;
}

// Refuses ggml's formats where neurons, or the formats of quantize, are required.
inline void check_not_ggml(const std::string& weights, const char* wanted) {
  STD_TORCH_CHECK(
      ggml_dtype(weights) == DType::kF32, "pi2: weights: expected ", wanted, ", found '", weights,
      "'. Blocks of GGUF files are for torch.ops.pi2.linear and dequantize, and for gate and up rows of sparse_ffn "
      "(q4_k+int8).");
}

// Whether `weights` ends with the suffix of torch_pi2.ops.linear for formats stored in blocks, which is taken off.
inline bool take_blocks(std::string* weights) {
  constexpr std::string_view kInBlocks = "_blocks";
  if (weights->size() < kInBlocks.size() || weights->substr(weights->size() - kInBlocks.size()) != kInBlocks)
    return false;
  weights->resize(weights->size() - kInBlocks.size());
  return true;
}

// Only "int4" and "int8".
inline DType quantized_dtype(const std::string& weights) {
  if (weights == "int4") return DType::kQ4;
  if (weights == "int8") return DType::kQ8;
  check_not_ggml(weights, "int4 or int8");
  STD_TORCH_CHECK(false, "pi2: weights: expected int4 or int8, found '", weights,
                  "'. See torch_pi2.Config(weights=...).");
  return DType::kQ4;
}

// "int4", "int8" and ggml's formats; `columns` must be a multiple of their block size.
inline DType rows_dtype(const std::string& weights, int64_t columns) {
  const DType dtype = ggml_dtype(weights);
  if (weights == "int4" || weights == "int8") return quantized_dtype(weights);
  STD_TORCH_CHECK(is_ggml(dtype),
                  "pi2: weights: expected int4, int8, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k or tq2_0, found '", weights,
                  "'. See torch_pi2.formats.");
  const int64_t numbers = ggml_block(dtype).numbers;
  STD_TORCH_CHECK(columns % numbers == 0, "pi2: columns of ", weights, ": expected a multiple of ", numbers,
                  " (its blocks), found ", columns, ". Pass the columns that the rows have in their file.");
  return dtype;
}

// How `tensor` stores weights: quantised rows (uint8) for "int4" and "int8", the tensor's own type for "float".
inline DType weights_dtype(const std::string& weights, const Tensor& tensor, const char* name) {
  if (weights == "float") {
    STD_TORCH_CHECK(tensor.scalar_type() != ScalarType::Byte, "pi2: dtype of ", name,
                    ": expected float32, bfloat16 or float16 with weights 'float', found uint8. Pass weights='int4' or "
                    "'int8', as it was quantised.");
    return float_dtype(tensor, name);
  }
  check_not_ggml(weights, "float, int4 or int8");
  STD_TORCH_CHECK(weights == "int4" || weights == "int8", "pi2: weights: expected float, int4 or int8, found '",
                  weights, "'. See torch_pi2.Config(weights=...).");
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Byte, "pi2: dtype of ", name, ": expected uint8 with weights '",
                  weights, "', found another. Quantise it with torch.ops.pi2.quantize.");
  return quantized_dtype(weights);
}

inline void check_plain(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu(), "pi2: device of ", name, ": expected cpu, found another. Move it with .cpu().");
}

// For messages: [2, 3].
inline std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t d = 0; d < tensor.dim(); ++d) text += (d == 0 ? "" : ", ") + std::to_string(tensor.size(d));
  return text + "]";
}

inline Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// Checks the output tensor of an operator on `x`.
inline void check_out(const Tensor& out, const Tensor& x, const std::vector<int64_t>& shape) {
  check_plain(out, "out");
  bool same = out.dim() == static_cast<int64_t>(shape.size());
  for (int64_t d = 0; same && d < out.dim(); ++d) same = out.size(d) == shape[static_cast<size_t>(d)];
  STD_TORCH_CHECK(same && out.scalar_type() == x.scalar_type() && out.is_contiguous(),
                  "pi2: out: expected a contiguous tensor with x's dtype and the operator's shape, found ",
                  out.scalar_type() == x.scalar_type() ? "" : "another dtype, ", out.is_contiguous() ? "" : "strided, ",
                  shape_of(out), ". Make it with torch.empty.");
}

// Checks that the last size of x is the layer's hidden size.
inline void check_hidden(const Tensor& x, int64_t hidden) {
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) == hidden, "pi2: hidden size of x: expected ", hidden,
                  " (the layer's), found ", x.dim() >= 1 ? x.size(x.dim() - 1) : 0,
                  ". Pass hidden states of this model.");
}

// The data of a contiguous uint8 tensor [count, row_bytes(columns)].
inline const void* quantized_rows(const Tensor& tensor, const char* name, DType dtype, int64_t count, int64_t columns) {
  check_plain(tensor, name);
  const int64_t bytes = row_bytes(dtype, columns);
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Byte && tensor.is_contiguous() && tensor.dim() == 2 &&
                      tensor.size(0) == count && tensor.size(1) == bytes,
                  "pi2: ", name, ": expected contiguous uint8 ", count, " x ", bytes, " (rows of ", columns, " ",
                  name_of(dtype), " numbers), found ",
                  tensor.scalar_type() == ScalarType::Byte ? "" : "another dtype, ",
                  tensor.is_contiguous() ? "" : "strided, ", shape_of(tensor), ". Quantise it again.");
  return tensor.const_data_ptr();
}

// A bias of `length` numbers of dtype `like`; returns its data pointer or null.
inline const void* bias_data(const MaybeTensor& bias, const char* name, int64_t length, ScalarType like,
                             const char* wanted) {
  if (!bias) return nullptr;
  check_plain(*bias, name);
  STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == length, "pi2: shape of ", name, ": expected [", length,
                  "], found ", bias->dim(), " dimensions of ", bias->numel(),
                  " elements in all. Check the layer's size.");
  STD_TORCH_CHECK(bias->scalar_type() == like, "pi2: dtype of ", name, ": expected ", wanted,
                  ", found another. Convert weights and biases together.");
  STD_TORCH_CHECK(bias->is_contiguous(), "pi2: layout of ", name,
                  ": expected contiguous, found strided. Call .contiguous().");
  return bias->const_data_ptr();
}

// Checks a mask: bool, [tokens, cold] or [..., cold] with the leading sizes of x; may be strided.
inline void check_mask(const Tensor& mask, const char* name, const Tensor& x, int64_t tokens, int64_t cold) {
  check_plain(mask, name);
  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool, "pi2: dtype of ", name,
                  ": expected bool, found another. Use .bool().");
  bool like_x = mask.dim() == x.dim() && mask.dim() > 0 && mask.size(mask.dim() - 1) == cold;
  for (int64_t d = 0; like_x && d + 1 < x.dim(); ++d) like_x = mask.size(d) == x.size(d);
  const bool flat = mask.dim() == 2 && mask.size(0) == tokens && mask.size(1) == cold;
  STD_TORCH_CHECK(like_x || flat, "pi2: shape of ", name, ": expected ", tokens, " tokens x ", cold,
                  " cold neurons for x of shape ", shape_of(x), ", found ", shape_of(mask),
                  ". It covers cold neurons only, one row per token of x.");
}

}  // namespace pi2::binding

template <>
struct torch::stable::detail::ToImpl<pi2::binding::Text> {
  static pi2::binding::Text call(StableIValue value, uint64_t, bool) {
    const auto handle = to<StringHandle>(value);
    size_t length = 0;
    const char* letters = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &letters));
    pi2::binding::Text text(letters, length);
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};
