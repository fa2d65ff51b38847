// Open stores, for all operators over one.
#pragma once

#include <memory>
#include <vector>

#include "bindings/torch/common.h"
#include "pi2/experts.h"
#include "pi2/offload.h"

namespace pi2::binding {

// The type of biases, by the format of down rows.
inline ScalarType bias_type(DType w_dtype) {
  return w_dtype == DType::kBF16 ? ScalarType::BFloat16 : w_dtype == DType::kF16 ? ScalarType::Half : ScalarType::Float;
}

// The store with this number from store_open; refuses numbers of closed stores.
std::shared_ptr<Offload> store_of(int64_t number);

// The gate rows of a layer, which say exactly which of its neurons have to be read: [neurons, ...]. `experts`: those of
// some experts together, and (not checked here) which of these each expert's are.
Predictor gate_in_memory(const FfnArgs& args, const std::vector<Tensor>& tensors, bool experts);

// A mixture whose experts are predicted while the one before it is computed.
struct EarlyRouting {
  std::vector<Tensor> tensors;  // `next` points into these and the numbers below
  std::vector<double> cuts;
  GuessRecord record;
  NextExperts next;
};

// For the mixture whose first layer is `layer`: the mixture to predict while it is computed, and the record of
// predictions for itself. Null: none.
struct Guesses {
  std::shared_ptr<EarlyRouting> next, own;
};
Guesses early_routing(int64_t number, int64_t layer);
// Begins the reads that store_prefetch asked for behind those of `layer`, once; null: none.
std::function<void()> asked_behind(int64_t number, int64_t layer);
void route_early(int64_t number, int64_t layer, std::shared_ptr<EarlyRouting> next);

}  // namespace pi2::binding
