// A prediction and its layer in one call: the mask stays in this thread's scratch and no host framework is in between.
#include <algorithm>

#include "core/scratch.h"
#include "pi2/predict.h"

namespace pi2 {
namespace {

constexpr std::int64_t kTokenTile = 64;  // that of the predictors and of sparse_ffn: slices are whole tiles

template <class Args>
void run(Args predictor, FfnArgs args, void (*predict)(const Args&, const ParallelFor&), const ParallelFor& parallel) {
  const std::int64_t cold = args.neurons - args.n_hot, all = args.tokens;
  if (cold == 0) return sparse_ffn(args, parallel);
  const std::int64_t tiles = std::max<std::int64_t>(1, kMaskBytes / (kTokenTile * cold));
  const std::int64_t slice = std::min(all, tiles * kTokenTile);
  auto* mask = reinterpret_cast<std::uint8_t*>(scratch(Scratch::kMask, (slice * cold + 3) / 4));
  const std::int64_t token_bytes = row_bytes(args.x_dtype, args.hidden);
  predictor.x_dtype = args.x_dtype;
  predictor.cold = cold;
  predictor.active = mask;
  args.active = mask;
  const auto* x = static_cast<const char*>(args.x);
  auto* y = static_cast<char*>(args.y);
  for (std::int64_t start = 0; start < all; start += slice) {
    args.tokens = predictor.tokens = std::min(slice, all - start);
    args.x = predictor.x = x + start * token_bytes;
    args.y = y + start * token_bytes;
    predict(predictor, parallel);
    sparse_ffn(args, parallel);
  }
}

}  // namespace

void predicted_ffn(const LowrankArgs& predictor, const FfnArgs& args, const ParallelFor& parallel) {
  run(predictor, args, &predict_lowrank, parallel);
}

void predicted_ffn(const SignbitArgs& predictor, const FfnArgs& args, const ParallelFor& parallel) {
  run(predictor, args, &predict_signbit, parallel);
}

}  // namespace pi2
