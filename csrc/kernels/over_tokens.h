// Walks the rows of a call in tiles of rows, and its batch in tiles of tokens.
#pragma once

#include <cstddef>
#include <type_traits>

#include "pi2/kernels.h"

namespace pi2 {

// Where row r begins. Without the barrier the compiler reads all pointers as one vector, which then waits for the
// stores that have just written them one by one: some 20 cycles a call.
__attribute__((always_inline)) inline const char* row_at(const void* const* rows, int r) {
  const char* row = static_cast<const char*>(rows[r]);
  __asm__("" : "+r"(row));
  return row;
}

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
  if constexpr (!std::is_same_v<decltype(kFour), std::nullptr_t>)
    if (count == 4 && tokens < 4) return kFour(rows, count, x_T, tokens, n, out_RT, next, next_bytes, steps);
  const char* hint = static_cast<const char*>(next);
  for (std::int64_t r = 0; r < count; r += 2) {
    const std::int64_t take = count - r < 2 ? 1 : 2;
    const std::int64_t end = count - r <= 2 ? next_bytes : next_bytes / 2;  // of this pair
    (take == 2 ? kPair : kSingle)(rows + r, take, x_T, tokens, n, out_RT + r * tokens, hint, end, steps);
    hint += end;
    next_bytes -= end;
  }
}

}  // namespace pi2
