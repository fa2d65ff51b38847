// Checks of a predictor, for operators with predictor and layer.
#pragma once

#include <string>
#include <vector>

#include "bindings/torch/common.h"
#include "pi2/predict.h"

namespace pi2::binding {

// The predictor of `kind` (lowrank, lowrank_q, signbit, mask) for the cold neurons of a layer, without the data of
// x. The tensors must outlive the result.
Predictor any_predictor(const Tensor& x, const FfnArgs& args, const std::vector<Tensor>& tensors,
                        const std::string& kind, double cut, const std::string& weights, bool int8_activations);

}  // namespace pi2::binding
