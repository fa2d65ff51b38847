// Plain types shared by the core, the kernels and the bindings. No framework is included here (design D1).
#pragma once

#include <cstdint>
#include <limits>

namespace pi2 {

// Storage format of a row of numbers. kQ4 and kQ8: weights in groups of 32 with a scale each. From kQ4_1 on: blocks as
// in GGUF files. See row_bytes().
enum class DType : int32_t {
  kF32 = 0,
  kBF16 = 1,
  kF16 = 2,
  kI8 = 3,
  kQ4 = 4,
  kQ8 = 5,
  kQ4_1 = 6,
  kQ5_0 = 7,
  kQ5_1 = 8,
  kQ4K = 9,
  kQ5K = 10,
  kQ6K = 11,
  kTQ2 = 12
};
constexpr int kDTypes = 13;

// Formats of quantize(): groups, with their scales at the row's end.
constexpr bool is_quantized(DType dtype) { return dtype == DType::kQ4 || dtype == DType::kQ8; }
// ggml's blocks: rows of linear layers as stored in files.
constexpr bool is_ggml(DType dtype) { return dtype >= DType::kQ4_1; }
// Formats of down rows that are bytes: those with axpy.
constexpr bool is_down_in_bytes(DType dtype) { return is_quantized(dtype) || dtype == DType::kTQ2; }
// Whether a number in a file is a valid format of neurons.
constexpr bool is_dtype_of_neurons(std::uint32_t code) {
  return code <= static_cast<std::uint32_t>(DType::kQ8) && code != static_cast<std::uint32_t>(DType::kI8);
}

// Weights per group of a quantised row; the last group of a row is padded with zeros.
constexpr int64_t kGroup = 32;
constexpr int64_t groups(int64_t n) { return (n + kGroup - 1) / kGroup; }

// The size of a block of a ggml format.
struct GgmlBlock {
  int64_t numbers = 1, bytes = 0;
};
constexpr GgmlBlock ggml_block(DType dtype) {
  switch (dtype) {
    case DType::kQ4_1: return {32, 20};
    case DType::kQ5_0: return {32, 22};
    case DType::kQ5_1: return {32, 24};
    case DType::kQ4K: return {256, 144};
    case DType::kQ5K: return {256, 176};
    case DType::kQ6K: return {256, 210};
    case DType::kTQ2: return {256, 66};
    default: return {};
  }
}

// Bytes of a row of n numbers. A quantised row is its groups' values, then a binary16 scale per group; the value of
// a weight is its stored integer times its group's scale.
//   kQ4  16 bytes a group: byte k holds weight k in its low and weight k + 16 in its high half, each plus 8 (0..15)
//   kQ8  32 bytes a group: weight k in byte k, signed
// Formats are local to a row: a neuron's gate row, up row and down column are contiguous, scales included. A row in a
// ggml format is a sequence of blocks (n is a multiple of their size); kernels/scalar/ggml.h describes them.
constexpr int64_t row_bytes(DType dtype, int64_t n) {
  switch (dtype) {
    case DType::kF32: return 4 * n;
    case DType::kBF16:
    case DType::kF16: return 2 * n;
    case DType::kI8: return n;
    case DType::kQ4: return groups(n) * (kGroup / 2 + 2);
    case DType::kQ8: return groups(n) * (kGroup + 2);
    default: return n / ggml_block(dtype).numbers * ggml_block(dtype).bytes;
  }
}

// The list is activations.inc.
enum class Activation : int32_t {
#define PI2_ACTIVATION(enumerator, name, value) enumerator,
#include "pi2/activations.inc"
#undef PI2_ACTIVATION
};
inline constexpr const char* kActivations[] = {
#define PI2_ACTIVATION(enumerator, name, value) name,
#include "pi2/activations.inc"
#undef PI2_ACTIVATION
};
inline constexpr std::uint32_t kActivationCount = sizeof(kActivations) / sizeof(kActivations[0]);

// Variations of an activation: out * act(in * min(v, limit)). Its factor is clamp(up, -limit, limit) + plus, unless up
// has an activation of its own. With `sigmas`, v is the part of the gate above a cut, else 0; the cut is the mean of
// the token's gates plus `sigmas` of their standard deviations (Gemma 3n). With `second` the matrices change places:
// the first is up, and the activation is that of the second. With `rms` the products h of a token are divided by the
// root of their mean square over all neurons plus `rms` (RMSNorm, BitNet): zeros stay zeros. FfnArgs::bias_up then has
// the norm's weights, factors of h, and up has no bias.
struct Shaping {
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float in = 1, out = 1, limit = kInfinity, plus = 0, sigmas = -kInfinity, rms = 0;
  bool second = false;
  bool plain = true;  // all of these have their defaults

  bool cuts() const { return sigmas > -kInfinity; }
  bool norms() const { return rms > 0; }
};

// Runs body(i) for every i in [0, n) on the threads of the host framework; returns when all are done. Inside PyTorch
// the core never creates compute threads of its own (design D9).
struct ParallelFor {
  using Body = void (*)(void* context, int64_t index);
  void (*run)(void* host, int64_t n, Body body, void* context) = nullptr;
  void* host = nullptr;
  int threads = 1;
};

// A ParallelFor that runs everything on the calling thread.
ParallelFor serial();

}  // namespace pi2
