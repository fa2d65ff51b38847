// Byte-pair encoding with the merges of a tokenizer.json (Sennrich et al., arXiv 1508.07909).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "fields.h"

namespace pi2::runner {

class Bpe {
 public:
  // Parses "model" of the file. Throws Problem for other kinds or inconsistent data.
  explicit Bpe(const Fields& model);

  // Appends the tokens of a non-empty piece.
  void encode(const std::string& piece, std::vector<std::int64_t>& ids) const;
  const std::unordered_map<std::string, std::uint32_t>& vocabulary() const { return ids_; }

 private:
  struct Merge {
    std::uint32_t rank, to;
  };
  const Merge* merge(std::uint32_t a, std::uint32_t b) const;
  std::vector<std::uint32_t> symbols(std::string_view piece) const;

  std::unordered_map<std::string, std::uint32_t> ids_;
  std::unordered_map<std::uint64_t, Merge> merges_;
  std::vector<std::int64_t> of_byte_;  // ids of <0x00> to <0xFF>, or -1; empty: no fallback
  std::int64_t unknown_ = -1;
  bool fuse_unknown_ = false, whole_words_ = false;
};

}  // namespace pi2::runner
