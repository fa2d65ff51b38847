// Slots of a store's layer on their way into memory: neighbours in the file as one read, each slot to its own place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "pi2/read_engine.h"
#include "store/store_file.h"

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
  std::int64_t between = 0;           // where its part of batch->between begins
};

// Deleted by whoever is told of its last read.
struct ReadBatch {
  std::int64_t layer = 0;
  bool asked_for = true;                  // by a call that waits for it, not by a guess
  bool arranging = false;                 // what is to stay, whether anybody asks for it or not
  std::int64_t chunk = -1, asked_ns = 0;  // for traces: that asked, and when
  std::vector<Wanted> wanted;
  std::vector<ReadRun> runs;
  std::vector<Read> reads;
  std::vector<iovec> parts;
  std::unique_ptr<char, decltype(&std::free)> between{nullptr, &std::free};  // where bytes between slots go
  std::int64_t left = 0;                                                     // reads that are not over

  // `wanted` ascending in the file; `read_bytes` of each slot are read to place_of(place). Reads of at most `most`
  // bytes; slots that nobody wants are read through if there are at most `most_between` bytes of them in a row: a
  // device takes as long for a read as for some more bytes of the one before.
  template <class PlaceOf>
  void plan(const StoreLayer& about, std::int64_t read_bytes, std::int64_t most, std::int64_t most_between,
            const PlaceOf& place_of) {
    constexpr std::int64_t kMostParts = 512;  // of 1024 that the system takes
    const std::int64_t n = static_cast<std::int64_t>(wanted.size());
    const std::int64_t step = 1 + most_between / about.slot_bytes;  // slots from one to the next of the same read
    runs.reserve(wanted.size());
    reads.reserve(wanted.size());
    parts.reserve(2 * wanted.size());
    const auto gap_before = [&](std::int64_t k) { return (file(k) - file(k - 1)) * about.slot_bytes - read_bytes; };
    std::int64_t between_bytes = 0;  // of each run its longest gap: runs are read by several threads at once
    for (std::int64_t i = 0; i < n;) {
      std::int64_t end = i + 1, longest = 0;
      while (end < n && file(end) <= file(end - 1) + step && (end - i) < kMostParts &&
             (file(end) - file(i) + 1) * about.slot_bytes <= most)
        longest = std::max(longest, gap_before(end++));
      runs.push_back({this, i, end - i, between_bytes});
      between_bytes += rounded_to_page(longest);
      i = end;
    }
    if (between_bytes > 0) {
      const auto bytes = static_cast<std::size_t>(between_bytes);
      between.reset(static_cast<char*>(std::aligned_alloc(static_cast<std::size_t>(kStorePage), bytes)));
      if (between == nullptr) throw std::bad_alloc();
    }
    for (ReadRun& run : runs) {
      const std::int64_t last = run.first + run.count - 1;
      Read read;
      read.offset = about.slots + file(run.first) * about.slot_bytes;
      read.bytes = (file(last) - file(run.first)) * about.slot_bytes + read_bytes;
      read.owner = &run;
      if (run.count == 1) {
        read.into = place_of(wanted[static_cast<std::size_t>(run.first)].place);
      } else {
        read.parts = parts.data() + parts.size();
        for (std::int64_t k = run.first; k <= last; ++k) {
          const std::int64_t gap = k > run.first ? gap_before(k) : 0;
          if (gap > 0) parts.push_back({between.get() + run.between, static_cast<std::size_t>(gap)});
          parts.push_back({place_of(wanted[static_cast<std::size_t>(k)].place), static_cast<std::size_t>(read_bytes)});
        }
        read.n_parts = parts.data() + parts.size() - read.parts;
      }
      reads.push_back(read);
    }
    left = static_cast<std::int64_t>(reads.size());
  }

 private:
  static std::int64_t rounded_to_page(std::int64_t n) { return (n + kStorePage - 1) / kStorePage * kStorePage; }
  std::int64_t file(std::int64_t i) const { return wanted[static_cast<std::size_t>(i)].in_file; }
};

}  // namespace pi2
