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

// Of the mixture of this store whose first layer is `layer`: what is to be guessed while it is computed, and what says
// whether it was guessed itself. Null: nothing.
struct Guesses {
  std::shared_ptr<EarlyRouting> next, own;
};
Guesses early_routing(int64_t number, int64_t layer);
void route_early(int64_t number, int64_t layer, std::shared_ptr<EarlyRouting> next);

}  // namespace pi2::binding
