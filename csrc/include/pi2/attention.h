// Attention of new tokens (a decoding step or a prompt) over a KV cache.
#pragma once

#include <cstdint>

#include "pi2/types.h"

namespace pi2 {

// A kI8 row of keys or values ends with its scale, a float. A kQ4 row is one of weights.
constexpr std::int64_t kKvScaleBytes = 4;
constexpr std::int64_t kv_row_bytes(DType dtype, std::int64_t width) {
  return row_bytes(dtype, width) + (dtype == DType::kI8 ? kKvScaleBytes : 0);
}
// What strides of keys and values count in: numbers, or bytes of quantised rows.
constexpr std::int64_t kv_unit_bytes(DType dtype) { return dtype == DType::kQ4 ? 1 : row_bytes(dtype, 1); }

// x in the basis of Walsh and Hadamard, and back: each run of as many numbers as the largest power of two that divides
// `width` is multiplied by its orthonormal symmetric matrix. Products of two rotated vectors are those of the vectors,
// and what is large in one number is spread over all, which few bits hold better (QuaRot, arXiv 2404.00456).
void rotate(float* x, std::int64_t width);

// A row of keys or values: of kI8 with the largest magnitude as 127, of kQ4 as quantize() has it; NaN scales if a
// number is not finite. torch_pi2/ops/attention.py is the reference, bit for bit.
void pack_kv(const float* x, DType dtype, std::int64_t width, char* row);

// rows[b, head, at[b, t]] = x[b, head, t], rotated and packed.
struct WriteKvArgs {
  DType dtype = DType::kF32, kv_dtype = DType::kI8;
  std::int64_t batch = 0, heads = 0, tokens = 0, width = 0, length = 0;
  const void* x = nullptr;           // [batch, heads, tokens, width], width contiguous
  char* rows = nullptr;              // [batch, heads, length, kv_row_bytes]
  std::int64_t x_strides[3] = {};    // in numbers
  std::int64_t row_strides[3] = {};  // in bytes
  const std::int64_t* at = nullptr;  // [batch, tokens]
};
// False: a position is out of range, and nothing is written.
bool write_kv(const WriteKvArgs& args, const ParallelFor& parallel);

// Positions per split: constant, so that the order of sums is, too.
constexpr std::int64_t kAttentionSplit = 512;
// Queries of a tile, at least: their queries, sums and scores, and 64 keys, fit in L2 together.
constexpr std::int64_t kAttentionRows = 64;

// y[b, t, n] = softmax over the positions l that token t of sequence b sees (scale * query[b, n, t] . key[b, k, l])
// times value[b, k, l], k = n / (heads / key_heads); zeros if it sees none. Sums are float32, over kAttendWord
// positions within splits of kAttentionSplit positions: a token's bits depend on its query and the positions that it
// sees, not on other tokens or sequences, the length of the cache, or the number of threads.
struct AttentionArgs {
  DType dtype = DType::kF32;                                     // of query and y: kF32, kBF16 or kF16
  DType kv_dtype = DType::kF32;                                  // of key and value; kI8, kQ4: see kv_row_bytes
  bool rotated = false;                                          // whether key and value are: see rotate()
  std::int64_t batch = 0, heads = 0, key_heads = 0, tokens = 0;  // heads: a multiple of key_heads
  std::int64_t length = 0, width = 0;                            // of the cache, of a head
  const void* query = nullptr;                                   // [batch, heads, tokens, width], width contiguous
  const void* key = nullptr;                                     // [batch, key_heads, length, width], width contiguous
  const void* value = nullptr;
  // Strides in numbers (kv_unit_bytes): sequence, head, token or position.
  std::int64_t query_strides[3] = {}, key_strides[3] = {}, value_strides[3] = {};
  const std::int64_t* lanes = nullptr;  // [batch]: the cache's sequence of each; null: the same number
  const std::uint8_t* mask =
      nullptr;                        // [batch, tokens, length]: nonzero where a token sees a position; null: see below
  std::int64_t mask_strides[2] = {};  // sequence, token
  // Without a mask: [batch, tokens], the last position that each token sees; null: see causal.
  const std::int64_t* positions = nullptr;
  std::int64_t window = 0;  // with positions: number of positions seen, including the last; 0: all
  bool causal = false;      // without mask and positions: token t sees positions 0 to t; false: all
  float scale = 1;
  float softcap = 0;             // c: scores become c tanh(score / c); 0: off
  const float* sinks = nullptr;  // [heads]: score of a further position without a value (gpt-oss); null: none
  void* y = nullptr;             // [batch, tokens, heads, width]
};

void attention(const AttentionArgs& args, const ParallelFor& parallel);

}  // namespace pi2
