// Slots of a store's layer on their way into memory: neighbours in the file as one read, each slot to its own place.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "core/store_file.h"
#include "pi2/read_engine.h"

namespace pi2 {

// A slot of the file and the place in memory that it is read into.
struct Wanted {
  std::int64_t in_file = 0;
  std::int32_t place = 0;
};

struct ReadBatch;

// One read of a batch.
struct ReadRun {
  ReadBatch* batch = nullptr;
  std::int64_t first = 0, count = 0;  // of batch->wanted
};

// Deleted by whoever is told of its last read.
struct ReadBatch {
  std::int64_t layer = 0;
  bool asked_for = true;                  // by a call that waits for it, not by a guess
  std::int64_t chunk = -1, asked_ns = 0;  // for traces: that asked, and when
  std::vector<Wanted> wanted;
  std::vector<ReadRun> runs;
  std::vector<Read> reads;
  std::vector<iovec> parts;
  std::unique_ptr<char, decltype(&std::free)> between{nullptr, &std::free};  // where bytes between slots go
  std::int64_t left = 0;                                                     // reads that are not over

  // `wanted` ascending in the file; `read_bytes` of each slot are read to place_of(place). Reads of at most `most`
  // bytes.
  template <class PlaceOf>
  void plan(const StoreLayer& about, std::int64_t read_bytes, std::int64_t most, const PlaceOf& place_of) {
    constexpr std::int64_t kMostParts = 512;  // of 1024 that the system takes
    const std::int64_t gap = about.slot_bytes - read_bytes, n = static_cast<std::int64_t>(wanted.size());
    runs.reserve(wanted.size());
    reads.reserve(wanted.size());
    parts.reserve(2 * wanted.size());
    for (std::int64_t i = 0; i < n;) {
      std::int64_t end = i + 1;
      while (end < n && file(end) == file(end - 1) + 1 && (end - i) < kMostParts &&
             (end - i + 1) * about.slot_bytes <= most)
        ++end;
      Read read;
      read.offset = about.slots + file(i) * about.slot_bytes;
      read.bytes = (end - i - 1) * about.slot_bytes + read_bytes;
      if (end - i == 1) {
        read.into = place_of(wanted[static_cast<std::size_t>(i)].place);
      } else {
        read.parts = parts.data() + parts.size();
        for (std::int64_t k = i; k < end; ++k) {
          if (k > i && gap > 0) parts.push_back({room_between(gap), static_cast<std::size_t>(gap)});
          parts.push_back({place_of(wanted[static_cast<std::size_t>(k)].place), static_cast<std::size_t>(read_bytes)});
        }
        read.n_parts = parts.data() + parts.size() - read.parts;
      }
      runs.push_back({this, i, end - i});
      reads.push_back(read);
      i = end;
    }
    for (std::size_t r = 0; r < reads.size(); ++r) reads[r].owner = &runs[r];
    left = static_cast<std::int64_t>(reads.size());
  }

 private:
  std::int64_t file(std::int64_t i) const { return wanted[static_cast<std::size_t>(i)].in_file; }

  char* room_between(std::int64_t gap) {
    if (between == nullptr) {
      const auto pages = static_cast<std::size_t>((gap + kStorePage - 1) / kStorePage * kStorePage);
      between.reset(static_cast<char*>(std::aligned_alloc(static_cast<std::size_t>(kStorePage), pages)));
      if (between == nullptr) throw std::bad_alloc();
    }
    return between.get();
  }
};

}  // namespace pi2
