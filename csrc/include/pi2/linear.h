// Linear layers over quantised rows, and the conversions between float and quantised rows.
#pragma once

#include <cstdint>

#include "pi2/types.h"

namespace pi2 {

// From this many tokens on, int8 activations use unpacked panels (ffn/panels.h), which sum in another order.
constexpr std::int64_t kGemmTokens = 12;

// y[t] = rows x[t] + bias. Each weight row is read once for up to 64 tokens. A token's bits do not depend on the
// other tokens, but on whether the call has at least kGemmTokens tokens.
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
  bool blocks = false;  // weights are stored in blocks (kernels.h); needs int8_activations, in_blocks(), takes_blocks()
};

// Whether this CPU's kernels take (and then prefer) rows of a dtype stored in blocks. A token's bits then never depend
// on other tokens, and are those of prompts.
bool takes_blocks(DType dtype);

void linear(const LinearArgs& args, const ParallelFor& parallel);

// At most kMostTogether layers in blocks of one x of fewer than kGemmTokens tokens, as one pass over all rows: x is
// prepared once, and threads wait for each other once. The bits are those of linear().
constexpr int kMostTogether = 8;
void linear_together(const LinearArgs* all, int count, const ParallelFor& parallel);

// y[t] = the sum of x[t][k] * weights[k] over the input channels k that token t uses, + bias. It uses those with
// |x[t][k]| > threshold (NaN counts, so that it shows) that `active` does not rule out; rows of others are not read.
// Chunks of channels are summed as sparse_ffn sums chunks of neurons: a token's bits depend on neither other tokens nor
// threads.
struct InputLinearArgs {
  const void* x = nullptr;  // [tokens, channels], x_dtype
  void* y = nullptr;        // [tokens, outputs], x_dtype
  DType x_dtype = DType::kF32;
  std::int64_t tokens = 0, channels = 0, outputs = 0;
  const void* weights = nullptr;  // [channels] rows of `outputs` numbers (row_bytes), a float type, kQ4 or kQ8
  DType w_dtype = DType::kF32;
  const float* bias = nullptr;           // [outputs] or null
  const std::uint8_t* active = nullptr;  // [tokens, channels] or null
  float threshold = 0;
};

void sparse_input_linear(const InputLinearArgs& args, const ParallelFor& parallel);

// Stores `count` rows of kQ4 or kQ8 in blocks; needs in_blocks(kPanelRows, columns). The last block is padded with zero
// rows. torch_pi2/ops/linear.py does the same for tensors.
void to_blocks(const void* rows, DType dtype, std::int64_t count, std::int64_t columns, void* blocks);

// One block of the rows rows[0, 16). `next`: null, or as many rows that are prefetched meanwhile.
void to_block(const void* const* rows, DType dtype, std::int64_t columns, const void* const* next, void* block);

// The largest magnitude of a weight that the largest binary16 scale can represent.
constexpr float largest_weight(DType quantized) { return 65504.0f * (quantized == DType::kQ4 ? 8.0f : 127.0f); }

// Why rows could not be quantised: a bad weight and its position.
struct QuantizeFault {
  bool found = false;
  std::int64_t row = 0;
  std::int64_t column = 0;
  float value = 0;
};

// rows[i] = quantised w[i], rounded to nearest with the scale, out of a few candidates, that has the smallest error.
// torch_pi2/ops/quantize.py is the reference, bit for bit. NaN and infinity have no quantised form, and a bad weight
// must not become a valid one. So every weight must be finite and at most largest_weight(to) in magnitude. Otherwise
// returns the first fault by row and column, whatever the number of threads; `rows` is undefined then. Allocates and
// throws nothing.
QuantizeFault quantize(const void* w, DType from, std::int64_t count, std::int64_t columns, DType to, void* rows,
                       const ParallelFor& parallel);

// out[i] = the values of row i. Rows are `stride_bytes` apart (rows of the same kind are not contiguous in neurons).
void dequantize(const void* rows, DType from, std::int64_t count, std::int64_t columns, std::int64_t stride_bytes,
                void* out, DType to, const ParallelFor& parallel);

}  // namespace pi2
