// Walks a batch in tiles of tokens.
#pragma once

#include "pi2/kernels.h"

namespace pi2 {

// kTileOf for every kTile tokens, then kSingle one by one. The prefetch hint, spread over a tile's `steps`, goes with
// the first pass over the rows only. The functions are template arguments so that no two instruction sets share an
// instance of this: the linker would keep one, compiled for either.
template <int kTile, auto kTileOf, auto kSingle>
inline void over_tokens(PI2_DOT_ARGS, std::int64_t steps) {
  (void)count;
  const char* hint = static_cast<const char*>(next);
  std::int64_t lines = steps > 0 ? (next_bytes + 64 * steps - 1) / (64 * steps) : 0;
  std::int64_t t = 0;
  for (; t + kTile <= tokens; t += kTile, lines = 0) kTileOf(rows, x_T + t, n, out_RT + t, tokens, hint, lines);
  for (; t < tokens; ++t, lines = 0) kSingle(rows, x_T + t, n, out_RT + t, tokens, hint, lines);
}

// The same with kPairOf for two of those that are left: few tokens of a batch want one neuron.
template <int kTile, auto kTileOf, auto kPairOf, auto kSingle>
inline void over_tokens(PI2_DOT_ARGS, std::int64_t steps) {
  (void)count;
  const char* hint = static_cast<const char*>(next);
  std::int64_t lines = steps > 0 ? (next_bytes + 64 * steps - 1) / (64 * steps) : 0;
  std::int64_t t = 0;
  for (; t + kTile <= tokens; t += kTile, lines = 0) kTileOf(rows, x_T + t, n, out_RT + t, tokens, hint, lines);
  for (; t + 2 <= tokens; t += 2, lines = 0) kPairOf(rows, x_T + t, n, out_RT + t, tokens, hint, lines);
  if (t < tokens) kSingle(rows, x_T + t, n, out_RT + t, tokens, hint, lines);
}

}  // namespace pi2
