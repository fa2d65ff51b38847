// Four numbers at once in the compiler's own vectors, for what every instruction set shares as a template: the
// operations of kernels/attention.h.
#pragma once

#include <cstring>

#include "kernels/scalar/convert.h"
#include "pi2/kernels.h"

namespace pi2::scalar {

template <class Stored>
struct Vectors {
  typedef float Float __attribute__((vector_size(16)));
  typedef std::int32_t Int __attribute__((vector_size(16)));
  static constexpr std::int64_t kLanes = 4;
  static constexpr std::int64_t kBytes = sizeof(typename Stored::Storage);

  static Float zero() { return Float{0, 0, 0, 0}; }
  static Float set1(float v) { return Float{v, v, v, v}; }
  static Float add(Float a, Float b) { return a + b; }
  static Float mul(Float a, Float b) { return a * b; }
  static Float max(Float a, Float b) { return a > b ? a : b; }
  static Float fma(Float a, Float b, Float c) { return a * b + c; }
  static float half(const char* p) {
    std::uint16_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    return F16::widen(bits);
  }
  static float reduce(Float v) { return (v[0] + v[1]) + (v[2] + v[3]); }
  static float reduce_max(Float v) {
    const float low = v[0] > v[1] ? v[0] : v[1], high = v[2] > v[3] ? v[2] : v[3];
    return low > high ? low : high;
  }
  static void reduce4(Float a, Float b, Float c, Float d, float* out) {
    store_floats(out, Float{reduce(a), reduce(b), reduce(c), reduce(d)});
  }
  static Float shift_exponent(Float p, Float t) {
    using Bits = std::uint32_t __attribute__((vector_size(16)));  // of NaN they overflow
    Bits bits, n;
    std::memcpy(&bits, &p, sizeof(p));
    std::memcpy(&n, &t, sizeof(t));
    bits += n << 23;
    std::memcpy(&p, &bits, sizeof(p));
    return p;
  }
  static Float zero_below(Float x, Float least, Float v) { return x < least ? zero() : v; }

  static Float load_floats(const float* p) {
    Float v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static void store_floats(float* p, Float v, std::int64_t left = kLanes) {
    std::memcpy(p, &v, static_cast<std::size_t>(left) * sizeof(float));
  }
  static Float load(const char* p, std::int64_t left = kLanes) {
    typename Stored::Storage v[kLanes] = {};
    std::memcpy(v, p, static_cast<std::size_t>(left) * sizeof(v[0]));
    return Float{Stored::widen(v[0]), Stored::widen(v[1]), Stored::widen(v[2]), Stored::widen(v[3])};
  }
};

}  // namespace pi2::scalar
