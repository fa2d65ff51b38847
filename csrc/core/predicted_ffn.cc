// A prediction and its layer in one call: the mask stays in this thread's scratch and no host framework is in between.
#include "core/scratch.h"
#include "pi2/predict.h"

namespace pi2 {
namespace {

template <class Args>
void run(Args predictor, FfnArgs args, void (*predict)(const Args&, const ParallelFor&), const ParallelFor& parallel) {
  const std::int64_t cold = args.neurons - args.n_hot;
  if (cold > 0) {
    auto* mask = reinterpret_cast<std::uint8_t*>(scratch(Scratch::kMask, (args.tokens * cold + 3) / 4));
    predictor.x = args.x;
    predictor.x_dtype = args.x_dtype;
    predictor.tokens = args.tokens;
    predictor.cold = cold;
    predictor.active = mask;
    predict(predictor, parallel);
    args.active = mask;
  }
  sparse_ffn(args, parallel);
}

}  // namespace

void predicted_ffn(const LowrankArgs& predictor, const FfnArgs& args, const ParallelFor& parallel) {
  run(predictor, args, &predict_lowrank, parallel);
}

void predicted_ffn(const SignbitArgs& predictor, const FfnArgs& args, const ParallelFor& parallel) {
  run(predictor, args, &predict_signbit, parallel);
}

}  // namespace pi2
