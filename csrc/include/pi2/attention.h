// Attention of new tokens, of a step or of a prompt, over a cache of keys and values.
#pragma once

#include <cstdint>

#include "pi2/types.h"

namespace pi2 {

// Behind the numbers of a kI8 row of keys or values: its scale, a float.
constexpr std::int64_t kKvScaleBytes = 4;

// Positions that are taken together: fixed, so that the order of every sum is.
constexpr std::int64_t kAttentionSplit = 512;
// Queries of a tile, at least: of so many, queries, sums and scores, and 64 keys, are in L2 together.
constexpr std::int64_t kAttentionRows = 64;

// y[b, t, n] = softmax over the positions l that token t of sequence b sees (scale * query[b, n, t] . key[b, k, l])
// times value[b, k, l], k = n / (heads / key_heads); zeros for who sees none. Sums are taken in float32, by kAttendWord
// positions within kAttentionSplit ones: a token's bits depend on its own query and on what it sees, not on the tokens
// or sequences beside it, on the length of the cache or on the threads.
struct AttentionArgs {
  DType dtype = DType::kF32;                                     // of query and y: kF32, kBF16 or kF16
  DType kv_dtype = DType::kF32;                                  // of key and value; kI8: see kKvScaleBytes
  std::int64_t batch = 0, heads = 0, key_heads = 0, tokens = 0;  // heads: a multiple of key_heads
  std::int64_t length = 0, width = 0;                            // of the cache, of a head
  const void* query = nullptr;  // [batch, heads, tokens, width], numbers of a head beside each other
  const void* key = nullptr;    // [batch, key_heads, length, width], as well
  const void* value = nullptr;
  // Numbers from one to the next: sequence, head, token or position.
  std::int64_t query_strides[3] = {}, key_strides[3] = {}, value_strides[3] = {};
  const std::int64_t* lanes = nullptr;  // [batch]: of which sequence of the cache each is; null: of its own number
  const std::uint8_t* mask = nullptr;   // [batch, tokens, length]: not zero where a token sees; null: see below
  std::int64_t mask_strides[2] = {};    // sequence, token
  // Without a mask: [batch, tokens], the last position that a token sees; null: see causal.
  const std::int64_t* positions = nullptr;
  std::int64_t window = 0;  // with positions: it sees so many, the last included; 0: all
  bool causal = false;      // without either: token t sees positions 0 to t; else everything
  float scale = 1;
  float softcap = 0;             // c: scores become c tanh(score / c); 0: they stay as they are
  const float* sinks = nullptr;  // [heads]: a score of a position that has no value (gpt-oss); null: none
  void* y = nullptr;             // [batch, tokens, heads, width]
};

void attention(const AttentionArgs& args, const ParallelFor& parallel);

}  // namespace pi2
