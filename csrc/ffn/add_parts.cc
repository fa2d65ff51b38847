#include "base/convert.h"
#include "base/scratch.h"
#include "pi2/ffn.h"

namespace pi2 {

void add_parts(const PartsArgs& args) {
  float* sum_H = scratch(Scratch::kInput, args.hidden);
  for (std::int64_t t = 0; t < args.tokens; ++t) {
    for (std::int64_t k = 0; k < args.hidden; ++k) sum_H[k] = 0;
    for (std::int64_t i = 0; i < args.count; ++i) {
      const float* part_H = args.parts + (args.order[i] * args.tokens + t) * args.hidden;
      for (std::int64_t k = 0; k < args.hidden; ++k) sum_H[k] += part_H[k];
    }
    if (args.bias != nullptr)
      for (std::int64_t k = 0; k < args.hidden; ++k) sum_H[k] += load_float(args.bias, args.bias_dtype, k);
    narrow(sum_H, static_cast<char*>(args.y) + t * row_bytes(args.y_dtype, args.hidden), args.y_dtype, args.hidden);
  }
}

}  // namespace pi2
