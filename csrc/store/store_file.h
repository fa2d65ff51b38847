// The part of model.pi2 that the core reads: the superblock with one entry per layer (docs/STORE.md). The reader in
// Python reads the rest.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pi2/types.h"

namespace pi2 {

constexpr std::int64_t kStorePage = 4096;

// Whether two numbers in a file are a valid pair of formats, of gate and up rows and of down rows, for this hidden
// size.
constexpr bool is_pair_of_neurons(std::uint32_t code, std::uint32_t down, std::uint64_t hidden) {
  const auto kinds = static_cast<std::uint32_t>(kDTypes);
  const auto dtype = static_cast<DType>(code);
  return code < kinds && (is_ggml(dtype) || is_quantized(dtype)) && down < kinds &&
         (dtype == DType::kTQ2 ? is_down_in_bytes(static_cast<DType>(down))
                               : is_quantized(static_cast<DType>(down)) && down != code) &&
         hidden % static_cast<std::uint64_t>(ggml_block(dtype).numbers) == 0;
}

// The neurons of a layer: contiguous slots of slot_bytes, each with `cluster` neurons (a neuron has `rows` rows of
// `hidden` numbers; the last slot may have fewer neurons) and zero padding.
struct StoreLayer {
  std::int64_t slots = 0;   // offset of the first slot in the file, a multiple of the page size
  std::int64_t checks = 0;  // offset of uint32 [neurons]: CRC32C of each neuron
  std::int64_t neurons = 0, hidden = 0, rows = 0;
  DType w_dtype = DType::kF32;
  std::int64_t slot_bytes = 0, row_bytes = 0;
  std::int64_t n_hot = 0, number = 0, cluster = 1;
  std::int64_t chunk = 0;          // neurons per chunk, if these are some chunks of a larger layer; 0: a whole layer
  DType down_dtype = DType::kF32;  // with other_down: the format of down rows, the last row of a neuron
  bool other_down = false;
  // Not 0: where the first rows of all neurons lie in the file, [neurons] rows, zeros up to a page; slots have the
  // other rows alone. Checksums of their pages follow those of the slots' neurons.
  std::int64_t gates = 0;

  std::int64_t gate_bytes() const { return gates == 0 ? 0 : neurons * row_bytes; }
  std::int64_t gate_pages() const { return (gate_bytes() + kStorePage - 1) / kStorePage; }
  std::int64_t down_bytes() const { return other_down ? pi2::row_bytes(down_dtype, hidden) : row_bytes; }
  std::int64_t neuron_bytes() const { return (rows - (gates == 0 ? 1 : 2)) * row_bytes + down_bytes(); }  // in a slot
  std::int64_t n_slots() const { return (neurons + cluster - 1) / cluster; }
};

// Parses the superblock in `data`, which begins at `start` in a file of `file_bytes`. Returns "" or an error message;
// `data` may be any bytes.
std::string parse_superblock(const void* data, std::int64_t bytes, std::int64_t start, std::int64_t file_bytes,
                             std::vector<StoreLayer>* layers);

// An open store file: two descriptors and the parsed superblock.
class StoreFile {
 public:
  StoreFile() = default;
  ~StoreFile();
  StoreFile(const StoreFile&) = delete;
  StoreFile& operator=(const StoreFile&) = delete;

  // Returns "" or an error message. `direct`: reads bypass the page cache (O_DIRECT) if a trial read gave the right
  // bytes.
  std::string open(const std::string& path, bool direct);

  const std::vector<StoreLayer>& layers() const { return layers_; }
  const std::uint32_t* checks(std::int64_t layer) const { return checks_[static_cast<std::size_t>(layer)].data(); }
  int descriptor() const { return direct_ >= 0 ? direct_ : plain_; }
  int plain_descriptor() const { return plain_; }
  bool direct() const { return direct_ >= 0; }
  // Alignment of offsets, lengths and addresses of reads; 1 if reads are not direct.
  std::int64_t unit() const { return direct_ >= 0 ? unit_ : 1; }
  std::int64_t file_bytes() const { return file_bytes_; }
  // Whether the file has shrunk since it was opened.
  bool is_shorter() const;

 private:
  bool direct_works(const void* known, std::int64_t start, std::int64_t unit) const;

  std::int64_t unit_ = 1;
  int plain_ = -1, direct_ = -1;
  std::int64_t file_bytes_ = 0;
  std::vector<StoreLayer> layers_;
  std::vector<std::vector<std::uint32_t>> checks_;
};

}  // namespace pi2
