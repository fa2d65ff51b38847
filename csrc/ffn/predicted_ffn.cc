// Predictor and layer in one call: the mask stays in this thread's scratch memory, without the host framework in
// between.
#include <algorithm>
#include <cstring>

#include "base/scratch.h"
#include "pi2/linear.h"
#include "pi2/predict.h"

namespace pi2 {
namespace {

template <class Args>
Args of_layer(Args predictor, const FfnArgs& args, std::uint8_t* active) {
  predictor.x = args.x;
  predictor.x_dtype = args.x_dtype;
  predictor.tokens = args.tokens;
  predictor.cold = args.neurons - args.n_hot;
  predictor.active = active;
  return predictor;
}

void copy_mask(const MaskArgs& chosen, const FfnArgs& args, std::uint8_t* active) {
  const std::int64_t cold = args.neurons - args.n_hot;
  for (std::int64_t t = 0; t < args.tokens; ++t) {
    const std::int64_t row = chosen.rows == nullptr ? t : chosen.rows[t];
    std::memcpy(active + t * cold, chosen.mask + (row + 1) * chosen.columns - cold, static_cast<std::size_t>(cold));
  }
}

}  // namespace

void predict(const Predictor& predictor, const FfnArgs& args, std::uint8_t* active, const ParallelFor& parallel) {
  if (predictor.kind == Predictor::Kind::kGate)
    predict_gate(args, predictor.gate_rows, active, parallel);
  else if (predictor.kind == Predictor::Kind::kSignbit)
    predict_signbit(of_layer(predictor.signbit, args, active), parallel);
  else if (predictor.kind == Predictor::Kind::kMask)
    copy_mask(predictor.mask, args, active);
  else
    predict_lowrank(of_layer(predictor.lowrank, args, active), parallel);
}

void predicted_ffn(const Predictor& predictor, const FfnArgs& layer, const ParallelFor& parallel) {
  FfnArgs args = layer;
  const std::int64_t cold = args.neurons - args.n_hot, all = args.tokens;
  // Prompts need nearly every neuron, and int8 activations compute them otherwise.
  const bool gate = predictor.kind == Predictor::Kind::kGate;
  const bool none = predictor.kind == Predictor::Kind::kNone || (gate && all >= kGemmTokens);
  if (cold == 0 || none) return sparse_ffn(args, parallel);
  std::int64_t tiles = std::max<std::int64_t>(1, kMaskBytes / (kPassTokens * cold));
  constexpr std::int64_t kOneReading = kPromptTokens / kPassTokens;
  if (tiles > kOneReading) tiles -= tiles % kOneReading;
  const std::int64_t slice = std::min(all, tiles * kPassTokens);
  auto* mask = reinterpret_cast<std::uint8_t*>(scratch(Scratch::kMask, (slice * cold + 3) / 4));
  const std::int64_t token_bytes = row_bytes(args.x_dtype, args.hidden);
  Predictor by = predictor;
  args.active = mask;
  args.all_fire = gate;
  args.piece = layer.piece || slice < all;
  for (std::int64_t start = 0; start < all; start += slice) {
    args.tokens = std::min(slice, all - start);
    args.more = layer.more || start + slice < all;
    args.x = static_cast<const char*>(layer.x) + start * token_bytes;
    args.y = static_cast<char*>(layer.y) + start * token_bytes;
    if (by.mask.rows != nullptr)
      by.mask.rows = predictor.mask.rows + start;
    else if (by.mask.mask != nullptr)
      by.mask.mask = predictor.mask.mask + start * by.mask.columns;
    predict(by, args, mask, parallel);
    // Everything is read for a prompt's last slice, however short, as for the slices before.
    if (predictor.kind == Predictor::Kind::kLowrank && predictor.lowrank.doubt > 0 && args.source != nullptr &&
        !args.piece)
      args.source->leave_out_missing(mask, args.tokens, args.n_hot);
    sparse_ffn(args, parallel);
  }
}

}  // namespace pi2
