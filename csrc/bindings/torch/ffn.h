// Checks of a sparse feed-forward layer, for all operators with one.
#pragma once

#include "bindings/torch/common.h"
#include "pi2/ffn.h"

namespace pi2::binding {

// "q4_k+int8": down rows have another format than gate and up rows.
inline bool has_two_formats(const std::string& weights) { return weights.find('+') != std::string::npos; }

// The arguments of sparse_ffn, without the data of x and out and without `active`. The tensors must outlive the result.
FfnArgs ffn_args(const Tensor& x, const Tensor& neuron_rows, const MaybeTensor& bias_gate, const MaybeTensor& bias_up,
                 const MaybeTensor& bias_down, const std::string& activation, bool activation_on_up, int64_t n_hot,
                 double threshold, const std::string& weights, bool int8_activations,
                 const MaybeTensor& thresholds = std::nullopt);

// Refuses up rows in blocks, which neither a mask nor a predictor takes.
void check_no_blocks(const FfnArgs& args);

// The distance in bytes of the down rows of neurons without gates from their up rows, if up rows lie one behind the
// other and down rows behind them; 0: they do not.
int64_t apart(const Tensor& neuron_rows);

// Adds to `args`, which has the layer's sizes, the settings that do not depend on where the neurons are. Biases have
// type `like`.
FfnArgs with_settings(FfnArgs args, const Tensor& x, ScalarType like, const MaybeTensor& bias_gate,
                      const MaybeTensor& bias_up, const MaybeTensor& bias_down, const std::string& activation,
                      bool activation_on_up, double threshold, bool int8_activations,
                      const MaybeTensor& thresholds = std::nullopt);

}  // namespace pi2::binding
