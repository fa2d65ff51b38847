// Open stores, for the operators that compute over one.
#pragma once

#include <memory>
#include <vector>

#include "bindings/torch/common.h"
#include "pi2/experts.h"
#include "pi2/offload.h"

namespace pi2::binding {

// Of the biases of layers whose down rows are stored so.
inline ScalarType bias_type(DType w_dtype) {
  return w_dtype == DType::kBF16 ? ScalarType::BFloat16 : w_dtype == DType::kF16 ? ScalarType::Half : ScalarType::Float;
}

// The store that store_open gave this number; refuses numbers of closed ones.
std::shared_ptr<Offload> store_of(int64_t number);

// A mixture of which experts are guessed while the one before is computed.
struct EarlyRouting {
  std::vector<Tensor> tensors;  // that `next` points into, and numbers
  std::vector<double> cuts;
  GuessRecord record;
  NextExperts next;
};

// What is to be guessed while the mixture of this store whose first layer is `layer` is computed; null: nothing.
std::shared_ptr<EarlyRouting> early_routing(int64_t number, int64_t layer);
// The same, by the first layer of what is guessed.
std::shared_ptr<EarlyRouting> early_routing_of(int64_t number, int64_t first_layer);
void route_early(int64_t number, int64_t layer, std::shared_ptr<EarlyRouting> next);

}  // namespace pi2::binding
