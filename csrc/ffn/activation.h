// The activations, element by element. relu keeps NaN (as PyTorch does): broken inputs must stay visible.
#pragma once

#include <cmath>

#include "pi2/ffn.h"

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

// The activation of a layer, of its gate or of a plain one's up; of the difference to the cut where it has one.
inline float activate(const FfnArgs& args, float v) {
  if (args.shaping.plain) return activate(args.activation, v);
  const Shaping& s = args.shaping;
  if (s.cuts() && v < 0) return 0.0f;
  return s.out * activate(args.activation, s.in * (v > s.limit ? s.limit : v));  // NaN stays
}

// What the activated gate is multiplied by.
inline float factor(const FfnArgs& args, float up) {
  if (args.activation_on_up) return activate(args, up);
  if (args.shaping.plain) return up;
  const float limit = args.shaping.limit;
  return (up > limit ? limit : up < -limit ? -limit : up) + args.shaping.plus;
}

}  // namespace pi2
