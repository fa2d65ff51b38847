// model.pi2 as the core sees it: the superblock, one entry per layer (docs/STORE.md). Everything else in the file is
// for the reader in Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pi2/types.h"

namespace pi2 {

constexpr std::int64_t kStorePage = 4096;

// Whether two numbers in a file say how neurons of `hidden` numbers are stored that have two formats: gate and up rows,
// then down rows.
constexpr bool is_pair_of_neurons(std::uint32_t code, std::uint32_t down, std::uint64_t hidden) {
  const auto kinds = static_cast<std::uint32_t>(kDTypes);
  const auto dtype = static_cast<DType>(code);
  return code < kinds && (is_ggml(dtype) || is_quantized(dtype)) && down < kinds &&
         is_quantized(static_cast<DType>(down)) && down != code &&
         hidden % static_cast<std::uint64_t>(ggml_block(dtype).numbers) == 0;
}

// A layer's neurons: slots of slot_bytes, one after another, each of `cluster` neurons (of one: `rows` rows of
// `hidden` numbers; the last slot may have fewer of them) and zeros.
struct StoreLayer {
  std::int64_t slots = 0;   // where the first begins in the file, on a page
  std::int64_t checks = 0;  // where its uint32 [neurons] begin: CRC32C of each neuron
  std::int64_t neurons = 0, hidden = 0, rows = 0;
  DType w_dtype = DType::kF32;
  std::int64_t slot_bytes = 0, row_bytes = 0;
  std::int64_t n_hot = 0, number = 0, cluster = 1;
  std::int64_t chunk = 0;  // neurons of a chunk of the layer that these are some chunks of; 0: they are all of it
  DType down_dtype = DType::kF32;  // with other_down: that of down rows, the last of a neuron's
  bool other_down = false;

  std::int64_t down_bytes() const { return other_down ? pi2::row_bytes(down_dtype, hidden) : row_bytes; }
  std::int64_t neuron_bytes() const { return (rows - 1) * row_bytes + down_bytes(); }
  std::int64_t n_slots() const { return (neurons + cluster - 1) / cluster; }
};

// Reads the superblock in `data`, of a file of `file_bytes` in which it begins at `start`. Returns what is wrong with
// it, "" if nothing; any bytes at all may be given.
std::string parse_superblock(const void* data, std::int64_t bytes, std::int64_t start, std::int64_t file_bytes,
                             std::vector<StoreLayer>* layers);

// An open store: two descriptors of one file, and what its superblock says.
class StoreFile {
 public:
  StoreFile() = default;
  ~StoreFile();
  StoreFile(const StoreFile&) = delete;
  StoreFile& operator=(const StoreFile&) = delete;

  // "" or what is wrong. `direct`: reads go past the page cache (O_DIRECT) where a trial read gave the right bytes.
  std::string open(const std::string& path, bool direct);

  const std::vector<StoreLayer>& layers() const { return layers_; }
  const std::uint32_t* checks(std::int64_t layer) const { return checks_[static_cast<std::size_t>(layer)].data(); }
  int descriptor() const { return direct_ >= 0 ? direct_ : plain_; }
  int plain_descriptor() const { return plain_; }
  bool direct() const { return direct_ >= 0; }
  // What offsets, lengths and addresses of reads are to be multiples of: 1 if they are not direct.
  std::int64_t unit() const { return direct_ >= 0 ? unit_ : 1; }
  std::int64_t file_bytes() const { return file_bytes_; }
  // Than it was when it was opened.
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
