// Inputs of fuzz_store: a byte that says how the rest is meant, 8 bytes each for where the superblock begins and
// for the size of the file, then bytes: a superblock, or with kFile what the file begins with.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "base/crc32c.h"
#include "store/store_file.h"

namespace pi2_fuzz {

constexpr std::uint8_t kSealed = 1;  // the bytes are a superblock, whose size and checksum are made right before
constexpr std::uint8_t kFile = 2;    // a file is opened; else only the parser is called
constexpr std::uint8_t kOptions = 4, kLoaded = 8, kQuantised = 16;  // of fuzz_blob
constexpr std::size_t kPrefix = 17;
constexpr std::int64_t kMostFile = 1 << 20;

inline void put(std::vector<std::uint8_t>* out, std::size_t at, std::uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) (*out)[at + i] = static_cast<std::uint8_t>(value >> (8 * i));
}

// What a mutation would hardly ever hit: so that what is behind it is reached.
inline void seal(std::vector<std::uint8_t>* superblock, std::int64_t file_bytes) {
  const auto page = static_cast<std::size_t>(pi2::kStorePage);
  superblock->resize(superblock->size() / page * page + page);
  std::memcpy(superblock->data(), "PI2STORE", 8);
  put(superblock, 12, 0, 4);
  put(superblock, 16, superblock->size(), 8);
  put(superblock, 24, static_cast<std::uint64_t>(file_bytes), 8);
  put(superblock, 12, pi2::crc32c(superblock->data(), superblock->size()), 4);
}

}  // namespace pi2_fuzz
