// Walks the rows of a call in tiles of rows, and its batch in tiles of tokens.
#pragma once

#include <cstddef>
#include <type_traits>

#include "pi2/kernels.h"

namespace pi2 {

// kTileOf for every kTile tokens, then kPairOf (if there is one) two by two, for the few tokens of a batch that want
// one neuron, then kSingle one by one. The prefetch hint, spread over a tile's `steps`, goes with the first pass over
// the rows only. The functions are template arguments so that no two instruction sets share an instance of this: the
// linker would keep one, compiled for either.
template <int kTile, auto kTileOf, auto kSingle, auto kPairOf = nullptr>
inline void over_tokens(PI2_DOT_ARGS, std::int64_t steps) {
  (void)count;
  const char* hint = static_cast<const char*>(next);
  std::int64_t lines = steps > 0 ? (next_bytes + 64 * steps - 1) / (64 * steps) : 0;
  std::int64_t t = 0;
  for (; t + kTile <= tokens; t += kTile, lines = 0) kTileOf(rows, x_T + t, n, out_RT + t, tokens, hint, lines);
  if constexpr (!std::is_same_v<decltype(kPairOf), std::nullptr_t>)
    for (; t + 2 <= tokens; t += 2, lines = 0) kPairOf(rows, x_T + t, n, out_RT + t, tokens, hint, lines);
  for (; t < tokens; ++t, lines = 0) kSingle(rows, x_T + t, n, out_RT + t, tokens, hint, lines);
}

// kFour (if there is one) for every four rows of fewer than four tokens, then kPair, then kSingle: functions like
// over_tokens, each given its share of the prefetch hint, in order, so that what is asked for first is wanted first.
template <auto kSingle, auto kPair, auto kFour = nullptr>
inline void over_rows(PI2_DOT_ARGS, std::int64_t steps) {
  const char* hint = static_cast<const char*>(next);
  for (std::int64_t r = 0, take = 0; r < count; r += take) {
    auto* tile = kSingle;
    take = 1;
    if (count - r >= 2) tile = kPair, take = 2;
    if constexpr (!std::is_same_v<decltype(kFour), std::nullptr_t>)
      if (count - r >= 4 && tokens < 4) tile = kFour, take = 4;
    const std::int64_t begin = next_bytes * r / count, end = next_bytes * (r + take) / count;
    tile(rows + r, take, x_T, tokens, n, out_RT + r * tokens, hint + begin, end - begin, steps);
  }
}

}  // namespace pi2
