// Attention of new tokens, of a step or of a prompt, over a cache of keys and values.
#pragma once

#include <cstdint>

#include "pi2/types.h"

namespace pi2 {

// Positions that are taken together: fixed, so that the order of every sum is.
constexpr std::int64_t kAttentionSplit = 512;

// y[b, t, n] = softmax over the positions l that token t of sequence b sees (scale * query[b, n, t] . key[b, k, l])
// times value[b, k, l], k = n / (heads / key_heads); zeros for who sees none. Sums are taken in float32, by kAttendWord
// positions within kAttentionSplit ones: a token's bits depend on its own query and on what it sees, not on the tokens
// or sequences beside it, on the length of the cache or on the threads.
struct AttentionArgs {
  DType dtype = DType::kF32;                                     // of all but the mask: kF32, kBF16 or kF16
  std::int64_t batch = 0, heads = 0, key_heads = 0, tokens = 0;  // heads: a multiple of key_heads
  std::int64_t length = 0, width = 0;                            // of the cache, of a head
  const void* query = nullptr;  // [batch, heads, tokens, width], numbers of a head beside each other
  const void* key = nullptr;    // [batch, key_heads, length, width], as well
  const void* value = nullptr;
  // Numbers from one to the next: sequence, head, token or position.
  std::int64_t query_strides[3] = {}, key_strides[3] = {}, value_strides[3] = {};
  const std::uint8_t* mask = nullptr;  // [batch, tokens, length]: not zero where a token sees; null: see causal
  std::int64_t mask_strides[2] = {};   // sequence, token
  bool causal = false;                 // without a mask: token t sees positions 0 to t; else everything
  float scale = 1;
  void* y = nullptr;  // [batch, tokens, heads, width]
};

void attention(const AttentionArgs& args, const ParallelFor& parallel);

}  // namespace pi2
