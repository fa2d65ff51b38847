// Open stores, for the operators that compute over one.
#pragma once

#include <memory>

#include "bindings/torch/common.h"
#include "pi2/offload.h"

namespace pi2::binding {

// Of the biases of layers whose down rows are stored so.
inline ScalarType bias_type(DType w_dtype) {
  return w_dtype == DType::kBF16 ? ScalarType::BFloat16 : w_dtype == DType::kF16 ? ScalarType::Half : ScalarType::Float;
}

// The store that store_open gave this number; refuses numbers of closed ones.
std::shared_ptr<Offload> store_of(int64_t number);

}  // namespace pi2::binding
