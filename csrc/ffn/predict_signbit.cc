// The sign-bit predictor: one pass over one bit per gate weight.
#include <algorithm>
#include <cstring>

#include "base/convert.h"
#include "base/parallel.h"
#include "base/scratch.h"
#include "base/timings.h"
#include "base/trace.h"
#include "ffn/signs.h"
#include "pi2/kernels.h"
#include "pi2/predict.h"

namespace pi2 {
namespace {

constexpr std::int64_t kRows = 512;  // rows per work item: 256 KB of signs at hidden size 4096
constexpr std::int64_t kTinyBytes = 1 << 16;

// The largest number of differing signs at which a neuron is still active; -1: never active.
std::int32_t most_differing(const SignbitArgs& args) {
  const auto active = [&](std::int64_t differing) {
    return static_cast<double>(args.columns - differing) >= args.margin * static_cast<double>(differing);
  };
  std::int64_t lowest = -1, highest = args.columns;  // bisection: activity falls with the number of differing signs
  while (lowest < highest) {
    const std::int64_t middle = lowest + (highest - lowest + 1) / 2;
    if (active(middle)) {
      lowest = middle;
    } else {
      highest = middle - 1;
    }
  }
  return static_cast<std::int32_t>(lowest);
}

struct Pass {
  const SignbitArgs& args;
  SignsFn count_signs;
  const std::uint64_t* x_TW;
  const std::uint8_t* nan_T;
  std::int64_t tokens, words;
  std::int32_t most_differing;
  std::uint8_t* active;  // mask of the first token of the pass

  void rows(std::int64_t block) const {
    const TraceSpan span(Stage::kPredictRows, block);
    const std::int64_t begin = block * kRows, count = std::min(kRows, args.cold - begin);
    const char* signs = static_cast<const char*>(args.signs) + begin * words * 8;
    std::int32_t differing[kRows];
    for (std::int64_t t = 0; t < tokens; ++t) {
      count_signs(signs, count, x_TW + t * words, words, differing);
      std::uint8_t* out = active + t * args.cold + begin;
      const std::int32_t most = nan_T[t] ? static_cast<std::int32_t>(args.columns) : most_differing;
      for (std::int64_t r = 0; r < count; ++r) out[r] = differing[r] <= most;
    }
  }
};

}  // namespace

void predict_signbit(const SignbitArgs& args, const ParallelFor& parallel) {
  const Timed timed(Timed::kPredictor, args.cold, args.columns);
  const TraceSpan span(Stage::kPredict, args.cold, args.tokens);
  if (args.tokens == 0 || args.cold == 0) return;
  const std::int64_t words = sign_bytes(args.columns) / 8, tile = std::min(kPassTokens, args.tokens);
  static_assert(sizeof(std::uint64_t) == 2 * sizeof(float));
  float* memory = scratch(Scratch::kInput, 2 * tile * words + args.columns);
  auto* x_TW = reinterpret_cast<std::uint64_t*>(memory);
  float* plain = memory + 2 * tile * words;
  std::uint8_t nan_T[kPassTokens];
  const std::int32_t most = most_differing(args);
  const std::int64_t x_bytes = row_bytes(args.x_dtype, args.columns);
  for (std::int64_t start = 0; start < args.tokens; start += tile) {
    Pass pass{args, kernels().count_signs,          x_TW, nan_T, std::min(tile, args.tokens - start), words,
              most, args.active + start * args.cold};
    for (std::int64_t t = 0; t < pass.tokens; ++t) {
      widen(static_cast<const char*>(args.x) + (start + t) * x_bytes, args.x_dtype, plain, args.columns);
      nan_T[t] = pack_signs(plain, args.columns, x_TW + t * words);
    }
    const bool tiny = pass.tokens * args.cold * words * 8 < kTinyBytes;
    Dynamic::run(
        tiny ? serial() : parallel, (args.cold + kRows - 1) / kRows,
        [](void* p, std::int64_t block) { static_cast<const Pass*>(p)->rows(block); }, &pass);
  }
}

}  // namespace pi2
