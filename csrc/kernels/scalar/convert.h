// Widening of stored weights to float, one element at a time. Also used by the core for inputs and biases.
#pragma once

#include <cstdint>
#include <cstring>

namespace pi2 {

inline float bits_to_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

struct F32 {
  using Storage = float;
  static float widen(float v) { return v; }
};

struct BF16 {
  using Storage = std::uint16_t;
  static float widen(std::uint16_t v) { return bits_to_float(static_cast<std::uint32_t>(v) << 16); }
};

struct F16 {
  using Storage = std::uint16_t;
  static float widen(std::uint16_t v) {
    const std::uint32_t sign = static_cast<std::uint32_t>(v & 0x8000u) << 16;
    const std::uint32_t rest = v & 0x7fffu;
    if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);  // inf, NaN
    if (rest >= 0x0400u) return bits_to_float(sign | ((rest << 13) + 0x38000000u));         // normal
    // Subnormal: rest * 2^-24, exact in float.
    return bits_to_float(sign | float_to_bits(static_cast<float>(rest) * 5.9604644775390625e-8f));
  }
};

struct I8 {
  using Storage = std::int8_t;
  static float widen(std::int8_t v) { return static_cast<float>(v); }
};

// Round to nearest even, as PyTorch does.
inline std::uint16_t narrow_bf16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);  // quiet NaN
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline std::uint16_t narrow_f16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {  // subnormal half: add 0.5 so that the float adder rounds at 2^-24
    const float rounded = bits_to_float(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (float_to_bits(rounded) - 0x3f000000u));
  }
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

}  // namespace pi2
