// Walks the rows of a call in tiles of rows, and its batch in tiles of tokens.
#pragma once

#include <cstddef>
#include <type_traits>

#include "pi2/kernels.h"

namespace pi2 {

// The start of row r. Without the barrier the compiler loads all pointers as one vector, which waits for the separate
// stores that have just written them: some 20 cycles per call.
__attribute__((always_inline)) inline const char* row_at(const void* const* rows, int r) {
  const char* row = static_cast<const char*>(rows[r]);
  __asm__("" : "+r"(row));
  return row;
}

// kTileOf for every kTile tokens, then kPairOf (if there is one) two by two, for the few tokens of a batch that want
// one neuron, then kSingle one by one. A tile takes `steps` steps; the rows (of `bytes`) to come are asked for in the
// first pass over these, so many bytes of each at every step (0 for none). The functions are template arguments so that
// no two instruction sets share an instance of this: the linker would keep one, compiled for either.
template <int kTile, auto kTileOf, auto kSingle, auto kPairOf = nullptr>
inline void over_tokens(PI2_DOT_ARGS, std::int64_t bytes, std::int64_t steps) {
  (void)count;
  std::int64_t pace = next != nullptr && steps > 0 ? (bytes + steps - 1) / steps : 0;
  std::int64_t t = 0;
  for (; t + kTile <= tokens; t += kTile, pace = 0) kTileOf(rows, x_T + t, n, out_RT + t, tokens, next, pace);
  if constexpr (!std::is_same_v<decltype(kPairOf), std::nullptr_t>)
    for (; t + 2 <= tokens; t += 2, pace = 0) kPairOf(rows, x_T + t, n, out_RT + t, tokens, next, pace);
  for (; t < tokens; ++t, pace = 0) kSingle(rows, x_T + t, n, out_RT + t, tokens, next, pace);
}

// kFour (if there is one) for every four rows of fewer than four tokens, then kPair, then kSingle: functions like
// over_tokens, each given as many of the rows to come.
template <auto kSingle, auto kPair, auto kFour = nullptr>
inline void over_rows(PI2_DOT_ARGS, std::int64_t bytes, std::int64_t steps) {
  if constexpr (!std::is_same_v<decltype(kFour), std::nullptr_t>)
    if (count == 4 && tokens < 4) return kFour(rows, count, x_T, tokens, n, out_RT, next, bytes, steps);
  for (std::int64_t r = 0; r < count; r += 2) {
    const std::int64_t take = count - r < 2 ? 1 : 2;
    (take == 2 ? kPair : kSingle)(rows + r, take, x_T, tokens, n, out_RT + r * tokens,
                                  next == nullptr ? nullptr : next + r, bytes, steps);
  }
}

// axpy of 1 to kAxpyRows rows: the function for as many.
template <auto kOne, auto kTwo, auto kThree, auto kFour>
inline void over_count(PI2_AXPY_ARGS) {
  switch (count) {
    case 1: return kOne(y, rows, h, n, next);
    case 2: return kTwo(y, rows, h, n, next);
    case 3: return kThree(y, rows, h, n, next);
    default: return kFour(y, rows, h, n, next);
  }
}

}  // namespace pi2
