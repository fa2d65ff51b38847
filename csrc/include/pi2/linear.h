// Linear layers over quantised rows, and the conversions between float and quantised rows.
#pragma once

#include <cstdint>

#include "pi2/types.h"

namespace pi2 {

// From so many tokens on, int8 activations go through unpacked panels (ffn/panels.h), whose sums have another order.
constexpr std::int64_t kGemmTokens = 12;

// y[t] = rows x[t] + bias. Each weight row is read once for up to 64 tokens. A token's bits do not depend on its
// company as long as there are fewer than kGemmTokens of them, or at least as many.
struct LinearArgs {
  const void* x = nullptr;  // [tokens, columns], x_dtype
  void* y = nullptr;        // [tokens, rows], x_dtype
  DType x_dtype = DType::kF32;
  std::int64_t tokens = 0;
  std::int64_t columns = 0;
  const void* weights = nullptr;  // [rows] rows of `columns` numbers (row_bytes), w_dtype quantised or ggml's
  DType w_dtype = DType::kQ4;
  std::int64_t rows = 0;
  const float* bias = nullptr;  // [rows] or null
  bool int8_activations = false;
  bool blocks = false;  // weights are in blocks (kernels.h); needs int8_activations, in_blocks(), takes_blocks()
};

// Whether the kernels of this CPU take rows of a dtype in blocks, which they then prefer. A token's bits then do not
// depend on its company at all, and are those of prompts.
bool takes_blocks(DType dtype);

void linear(const LinearArgs& args, const ParallelFor& parallel);

// `count` rows of kQ4 or kQ8 in blocks, for in_blocks(kPanelRows, columns) and as many blocks as it takes: what the
// last one has of rows beyond is zero. torch_pi2/ops/linear.py does the same for tensors.
void to_blocks(const void* rows, DType dtype, std::int64_t count, std::int64_t columns, void* blocks);

// Magnitude of a weight above which even the largest binary16 scale is too small.
constexpr float largest_weight(DType quantized) { return 65504.0f * (quantized == DType::kQ4 ? 8.0f : 127.0f); }

// Why rows could not be quantised: a number and where it is.
struct QuantizeFault {
  enum Kind { kNone, kWeight, kImportance } kind = kNone;
  std::int64_t row = 0;  // of a weight
  std::int64_t column = 0;
  float value = 0;
};

// rows[i] = quantised w[i]: round to nearest with the scale, out of a few, that has the smallest error, where column
// k's squared error counts importance[k] times (null: 1). torch_pi2/ops/quantize.py is the reference, bit for
// bit.
// No integer stands for NaN or infinity, and a broken weight must not become a sound one: every weight must be finite
// and at most largest_weight(to) in magnitude, every importance finite and not negative (also where `to` does not use
// it). Else the first fault is returned, importance before weights, weights by row and column whatever the number of
// threads, and what is in `rows` means nothing. Nothing is allocated and nothing thrown.
QuantizeFault quantize(const void* w, DType from, std::int64_t count, std::int64_t columns, const float* importance,
                       DType to, void* rows, const ParallelFor& parallel);

// out[i] = the values of row i; rows are `stride_bytes` apart (a neuron's rows are not next to each other).
void dequantize(const void* rows, DType from, std::int64_t count, std::int64_t columns, std::int64_t stride_bytes,
                void* out, DType to, const ParallelFor& parallel);

}  // namespace pi2
