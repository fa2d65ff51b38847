// Formats of rows by name, as in torch_pi2/formats.py.
#pragma once

#include <string>

#include "pi2/types.h"

namespace pi2::binding {

inline const char* name_of(DType dtype) {
  static const char* const names[kDTypes] = {"float32", "bfloat16", "float16", "int8 rows", "int4", "int8", "q4_1",
                                             "q5_0",    "q5_1",     "q4_k",    "q5_k",      "q6_k", "tq2_0"};
  return names[static_cast<int>(dtype)];
}

// The ggml format of this name, or kF32.
inline DType ggml_dtype(const std::string& weights) {
  for (int d = 0; d < kDTypes; ++d)
    if (is_ggml(static_cast<DType>(d)) && weights == name_of(static_cast<DType>(d))) return static_cast<DType>(d);
  return DType::kF32;
}

}  // namespace pi2::binding
