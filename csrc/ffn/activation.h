// The activations, element by element. relu keeps NaN (as PyTorch does): broken inputs must stay visible.
#pragma once

#include <cmath>

#include "pi2/types.h"

namespace pi2 {

inline float activate(Activation activation, float v) {
  switch (activation) {
    case Activation::kRelu: return v < 0 ? 0.0f : v;
    case Activation::kRelu2: return v < 0 ? 0.0f : v * v;
    case Activation::kSilu: return v / (1.0f + std::exp(-v));
    case Activation::kGelu: return 0.5f * v * (1.0f + std::erf(v * 0.70710678118654752f));
    case Activation::kGeluTanh:
      return 0.5f * v * (1.0f + std::tanh(0.79788456080286536f * (v + 0.044715f * v * v * v)));
    case Activation::kIdentity: return v;
  }
  return v;
}

}  // namespace pi2
