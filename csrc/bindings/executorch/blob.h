// The delegate blob: the part of a .pte that describes a feed-forward layer or a mixture of experts (docs/FORMATS.md,
// "Delegate blob").
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "bindings/executorch/fault.h"
#include "pi2/types.h"

namespace pi2::et {

constexpr std::size_t kBlobBytes = 512;

enum class Role : std::uint32_t { kWhole, kSubmit, kCollect };
enum class PredictorForm : std::uint32_t { kNone, kLowrank, kLowrankInt4, kLowrankInt8, kSignbit };

// The dtype of the matrices of a low-rank predictor.
constexpr DType matrix_dtype(PredictorForm form) {
  return form == PredictorForm::kLowrank ? DType::kI8 : form == PredictorForm::kLowrankInt4 ? DType::kQ4 : DType::kQ8;
}

// The place of a tensor in the store; bytes 0: none.
struct Place {
  std::uint64_t offset = 0, bytes = 0;
  std::uint32_t checksum = 0;
};

// In the order of the blob. For a sign-bit predictor kA holds the signs. For a mixture, tensors hold those of all
// experts, one after the other; kCuts (of predictors, only for mixtures) and kThresholds (of gates) are doubles. For a
// layer, kThresholds are floats, one per neuron, instead of `threshold`.
enum TensorName { kBiasGate, kBiasUp, kBiasDown, kA, kAScale, kB, kBScale, kBBias, kCuts, kThresholds, kTensorNames };
extern const char* const kTensorText[kTensorNames];

struct Blob {
  Role role = Role::kWhole;
  std::uint64_t store_bytes = 0;
  std::uint32_t header_checksum = 0;
  std::int64_t layer = 0;
  std::array<unsigned char, 32> model_hash{};
  std::int64_t hidden = 0, neurons = 0, rows = 0;
  DType w_dtype = DType::kF32, down_dtype = DType::kF32;  // the second with other_down
  bool other_down = false;
  Activation activation = Activation::kRelu;
  bool activation_on_up = false, int8_activations = false, predictor_int8_activations = false;
  std::int64_t n_hot = 0, first = 0;
  std::int64_t preload_from = 0;  // of a whole layer: neurons before it are wanted by prompts alone
  float threshold = 0;
  Shaping shaping;
  PredictorForm predictor = PredictorForm::kNone;
  double cut = 0;
  std::int64_t rank = 0;
  std::int64_t dense_from = 0;
  std::array<Place, kTensorNames> tensors{};
  std::uint32_t queue = 0;
  std::int64_t experts = 0;  // a mixture: this many layers of the store from `layer` on; 0: a single layer
  std::string store;         // file name

  std::int64_t cold() const { return neurons - n_hot; }
  bool own_thresholds() const { return experts == 0 && tensors[kThresholds].bytes > 0; }  // one per neuron
  std::int64_t layers() const { return experts == 0 ? 1 : experts; }
  bool quantized() const { return other_down || is_quantized(w_dtype); }
};

// Accepts any bytes: a parsed blob is consistent, and every place lies within `store_bytes`.
Problem parse_blob(const void* data, std::size_t bytes, Blob* blob);

}  // namespace pi2::et
