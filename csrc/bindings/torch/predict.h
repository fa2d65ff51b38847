// The checks of a predictor, for the operators that have one with their layer.
#pragma once

#include <string>
#include <vector>

#include "bindings/torch/common.h"
#include "pi2/predict.h"

namespace pi2::binding {

// The predictor of `kind` (lowrank, lowrank_q, signbit), but for x's data, whose `tensors` are for the cold neurons of
// a layer of args.neurons. The tensors must outlive what is returned.
Predictor any_predictor(const Tensor& x, const FfnArgs& args, const std::vector<Tensor>& tensors,
                        const std::string& kind, double cut, const std::string& weights, bool int8_activations);

}  // namespace pi2::binding
