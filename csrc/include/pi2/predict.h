// Predictors decide which cold neurons to compute: alone, or in one call with the layer.
#pragma once

#include <cstdint>

#include "pi2/ffn.h"
#include "pi2/types.h"

namespace pi2 {

// Mark of a doubtful neuron: it is computed only if it is in memory (NeuronSource).
constexpr std::uint8_t kIfThere = 2;

// active[t, c] = !(b[c] . relu(a x[t]) + b_bias[c] < threshold): NaN counts as active, so that it shows. With rank 0
// the bias alone (0 without one) is compared. The mark is kIfThere instead of 1 if the score exceeds the threshold by
// less than `doubt`.
struct LowrankArgs {
  const void* x = nullptr;  // [tokens, hidden], x_dtype
  DType x_dtype = DType::kF32;
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  DType dtype = DType::kI8;        // of a and b: kI8 with the scales below; kQ4 or kQ8, which have their own
  const void* a = nullptr;         // [rank] rows of hidden numbers
  const float* a_scale = nullptr;  // [rank], kI8 only
  std::int64_t rank = 0;
  const void* b = nullptr;         // [skipped + cold] rows of rank numbers
  const float* b_scale = nullptr;  // [cold], kI8 only
  const float* b_bias = nullptr;   // [cold] or null
  std::int64_t cold = 0;
  bool int8_activations = false;  // kQ4, kQ8: x and relu(a x) as int8 with a scale per 32
  bool blocks = false;            // kQ4, kQ8, int8 activations: a and b are stored in blocks (pi2/kernels.h)
  std::int64_t skipped = 0;       // rows of b before those of cold neurons; 0 unless in blocks
  float threshold = 0;
  float doubt = 0;
  std::uint8_t* active = nullptr;  // [tokens, cold]
};

void predict_lowrank(const LowrankArgs& args, const ParallelFor& parallel);

// Bytes for the signs of `columns` numbers: bit k % 8 of byte k / 8 is 1 if number k is negative; padding is 0.
constexpr std::int64_t sign_bytes(std::int64_t columns) { return (columns + 63) / 64 * 8; }

// SparseInfer (arXiv 2411.12692): of the products w[c][k] x[t][k], `differing` count as negative because their
// signs differ, and `agreeing` = columns - differing as positive. active[t, c] = agreeing >= margin * differing,
// the paper's rule with margin = 1 / alpha: a smaller margin computes more, 0 everything. A token with a NaN makes
// every neuron active. Zeros, also negative zeros, count as positive.
struct SignbitArgs {
  const void* x = nullptr;  // [tokens, columns], x_dtype
  DType x_dtype = DType::kF32;
  std::int64_t tokens = 0;
  std::int64_t columns = 0;
  const void* signs = nullptr;  // [cold, sign_bytes(columns)]
  std::int64_t cold = 0;
  double margin = 1;               // finite, 0 or more
  std::uint8_t* active = nullptr;  // [tokens, cold]
};

void predict_signbit(const SignbitArgs& args, const ParallelFor& parallel);

// The gate itself, lossless: active[t, c] = whether cold neuron c fires for token t, with the products of sparse_ffn.
// `rows`: gate rows (up rows of a layer without gates) of all neurons of `layer`, which may have a source for the
// others. For fewer than kGemmTokens tokens (linear.h), and not for a layer that cuts (Shaping).
void predict_gate(const FfnArgs& layer, const void* rows, std::uint8_t* active, const ParallelFor& parallel);

// A choice that the caller made: token t computes the cold neurons that are not 0 in the last columns of its row.
struct MaskArgs {
  const std::uint8_t* mask = nullptr;  // rows of `columns`
  std::int64_t columns = 0;            // at least the layer's cold neurons
  const std::int64_t* rows = nullptr;  // [tokens], each token's row; null: they follow each other
};

// A predictor of any kind, or none.
struct Predictor {
  enum class Kind { kNone, kLowrank, kSignbit, kGate, kMask };
  Kind kind = Kind::kNone;
  LowrankArgs lowrank;
  SignbitArgs signbit;
  MaskArgs mask;
  const void* gate_rows = nullptr;  // kGate
};

// active = the mask [args.tokens, args.neurons - args.n_hot] of the neurons that the layer computes. x, its dtype,
// tokens and cold neurons are taken from the layer. Not for kind kNone.
void predict(const Predictor& predictor, const FfnArgs& args, std::uint8_t* active, const ParallelFor& parallel);

// predict, then sparse_ffn, with the same bits; hidden sizes must agree. Long prompts are cut into slices with
// kMaskBytes of mask (at least 64 tokens), so that memory does not grow with the prompt; a slice counts as a call in
// counters and timings. Kind kNone, and kGate for kGemmTokens tokens or more: sparse_ffn alone.
constexpr std::int64_t kMaskBytes = 1 << 23;
void predicted_ffn(const Predictor& predictor, const FfnArgs& args, const ParallelFor& parallel);

}  // namespace pi2
