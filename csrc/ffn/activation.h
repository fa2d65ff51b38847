// The activations of pi2/activations.inc, element by element.
#pragma once

#include <cmath>

#include "pi2/ffn.h"

namespace pi2 {

inline float activate(Activation activation, float v) {
  switch (activation) {
#define PI2_ACTIVATION(enumerator, name, value) \
  case Activation::enumerator: return value;
#include "pi2/activations.inc"
#undef PI2_ACTIVATION
  }
  return v;
}

inline float activate(Activation activation, const Shaping& s, float v) {
  if (s.cuts() && v < 0) return 0.0f;
  return s.out * activate(activation, s.in * (v > s.limit ? s.limit : v));  // NaN stays
}

inline float clamp(const Shaping& s, float v) { return (v > s.limit ? s.limit : v < -s.limit ? -s.limit : v) + s.plus; }

// The activation of a neuron's first matrix (gate, or up of a plain layer), which decides whether it fires; applied to
// the difference to the cut if there is one.
inline float activate(const FfnArgs& args, float v) {
  if (args.shaping.plain) return activate(args.activation, v);
  return args.shaping.second ? clamp(args.shaping, v) : activate(args.activation, args.shaping, v);
}

// The factor from the second matrix.
inline float factor(const FfnArgs& args, float v) {
  if (args.activation_on_up) return activate(args, v);
  if (args.shaping.plain) return v;
  return args.shaping.second ? activate(args.activation, args.shaping, v) : clamp(args.shaping, v);
}

// With Shaping::rms, for one token: the squares of the h of the neurons in turn, and its factor once all are added.
inline float norm_factor(const FfnArgs& args, double squares) {
  const double mean = squares / static_cast<double>(args.neurons);
  return static_cast<float>(1 / std::sqrt(mean + static_cast<double>(args.shaping.rms)));
}

// Adds the square of h to the token's and returns h times the neuron's weight in the norm (1: it has none).
inline float normed(float h, float weight, double* squares) {
  *squares += static_cast<double>(h) * static_cast<double>(h);
  return h * weight;
}

}  // namespace pi2
