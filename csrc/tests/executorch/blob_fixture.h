// Blobs byte by byte as docs/FORMATS.md says, of layers of a StoreFixture, and tensors behind its neurons.
#pragma once

#include <vector>

#include "bindings/executorch/blob.h"
#include "tests/store_fixture.h"

namespace pi2_test {

using Bytes512 = std::vector<char>;

// The checksum, after whatever was changed.
inline void seal_blob(Bytes512* bytes) {
  put(bytes, 12, 0, 4);
  put(bytes, 12, pi2::crc32c(bytes->data(), bytes->size()), 4);
}

template <class Float>
std::uint64_t bits(Float value) {
  std::uint64_t out = 0;
  std::memcpy(&out, &value, sizeof(value));
  return out;
}

// Where a blob has the place of a tensor; those of mixtures alone are behind the queue.
constexpr std::size_t place_of(std::size_t tensor) {
  return tensor < pi2::et::kCuts ? 128 + 24 * tensor : 328 + 24 * (tensor - pi2::et::kCuts);
}

inline Bytes512 written(const pi2::et::Blob& blob) {
  Bytes512 out(pi2::et::kBlobBytes, 0);
  std::memcpy(out.data(), "PI2BLOB", 8);
  const auto u32 = [&](std::size_t at, std::int64_t value) { put(&out, at, static_cast<std::uint64_t>(value), 4); };
  const bool thresholds = blob.experts == 0 && blob.tensors[pi2::et::kThresholds].bytes > 0;
  const bool biases = blob.experts > 0 && blob.tensors[pi2::et::kBiasDown].bytes > 0;
  const bool extended = blob.other_down || thresholds || biases || !blob.shaping.plain;
  u32(8, extended ? 3 : blob.experts > 0 ? 2 : 1);
  u32(16, 512);
  u32(20, static_cast<std::int64_t>(blob.role));
  put(&out, 24, blob.store_bytes, 8);
  u32(32, blob.header_checksum);
  u32(36, blob.layer);
  std::memcpy(&out[40], blob.model_hash.data(), 32);
  const std::int64_t numbers[] = {blob.hidden,
                                  blob.neurons,
                                  blob.rows,
                                  static_cast<std::int64_t>(blob.w_dtype),
                                  static_cast<std::int64_t>(blob.activation),
                                  blob.activation_on_up + 2 * blob.int8_activations +
                                      4 * blob.predictor_int8_activations + 8 * !blob.shaping.plain +
                                      16 * blob.shaping.second,
                                  blob.n_hot,
                                  blob.first,
                                  static_cast<std::int64_t>(bits(blob.threshold)),
                                  static_cast<std::int64_t>(blob.predictor)};
  for (std::size_t i = 0; i < 10; ++i) u32(72 + 4 * i, numbers[i]);
  put(&out, 112, bits(blob.cut), 8);
  u32(120, blob.rank);
  u32(124, blob.dense_from);
  for (std::size_t i = 0; i < pi2::et::kTensorNames; ++i) {
    const std::size_t at = place_of(i);
    put(&out, at, blob.tensors[i].offset, 8);
    put(&out, at + 8, blob.tensors[i].bytes, 8);
    put(&out, at + 16, blob.tensors[i].checksum, 4);
  }
  u32(376, blob.experts);
  if (blob.other_down) u32(380, static_cast<std::int64_t>(blob.down_dtype));
  u32(320, blob.queue);
  u32(324, blob.preload_from);
  const pi2::Shaping& s = blob.shaping;
  const float shaping[] = {s.in, s.out, s.limit, s.plus, s.sigmas};
  for (std::size_t i = 0; i < 5 && !s.plain; ++i) u32(480 + 4 * i, static_cast<std::int64_t>(bits(shaping[i])));
  std::memcpy(&out[384], blob.store.data(), blob.store.size());
  seal_blob(&out);
  return out;
}

// A call of a layer without predictor and biases.
inline pi2::et::Blob blob_of(const StoreFixture& store, std::size_t layer) {
  const pi2::StoreLayer& l = store.layers[layer];
  pi2::et::Blob blob;
  blob.store_bytes = store.file.size();
  blob.header_checksum = pi2::crc32c(store.file.data(), StoreFixture::kStart);
  std::memcpy(blob.model_hash.data(), &store.superblock[40], 32);
  blob.layer = static_cast<std::int64_t>(layer);
  blob.hidden = l.hidden;
  blob.neurons = l.neurons;
  blob.rows = l.rows;
  blob.w_dtype = l.w_dtype;
  blob.down_dtype = l.down_dtype;
  blob.other_down = l.other_down;
  blob.store = store.path.substr(store.path.rfind('/') + 1);
  return blob;
}

// Appends a tensor; write() afterwards, and blobs only then.
inline pi2::et::Place append(StoreFixture* store, const void* data, std::size_t bytes) {
  const pi2::et::Place place{store->file.size(), bytes, pi2::crc32c(data, bytes)};
  const auto* from = static_cast<const char*>(data);
  store->file.insert(store->file.end(), from, from + bytes);
  store->pad();
  put(&store->superblock, 24, store->file.size(), 8);
  seal(&store->superblock);
  return place;
}

}  // namespace pi2_test
