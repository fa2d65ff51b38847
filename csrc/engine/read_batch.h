// A batch of slots of one layer to be read: neighbours in the file are one read, each slot goes to its own place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "engine/read_error.h"
#include "pi2/read_engine.h"
#include "store/store_file.h"

namespace pi2 {

// A slot of the file and the place in memory that it is read into.
struct Wanted {
  std::int64_t in_file = 0;
  std::int32_t place = 0;
};

// Memory for the gates of a layer (StoreLayer::gates), which one caller has at a time.
struct GateBuffer {
  std::unique_ptr<char, decltype(&std::free)> data{nullptr, &std::free};
  std::int64_t capacity = 0, left = 0;  // reads that have not ended; with the lock of the store
  ReadError wrong;                      // of the first that failed

  bool reserve(std::int64_t bytes) {
    if (bytes <= capacity) return true;
    const auto size = static_cast<std::size_t>((bytes + kStorePage - 1) / kStorePage * kStorePage);
    data.reset(static_cast<char*>(std::aligned_alloc(static_cast<std::size_t>(kStorePage), size)));
    capacity = data == nullptr ? 0 : static_cast<std::int64_t>(size);
    return data != nullptr;
  }
};

struct ReadBatch;

// One read of a batch.
struct ReadRun {
  ReadBatch* batch = nullptr;
  std::int64_t first = 0, count = 0;  // of batch->wanted; of gates the first page
  std::int64_t between = 0;           // where its part of batch->between begins
};

// Deleted when its last read ends.
struct ReadBatch {
  std::int64_t layer = 0;
  bool asked_for = true;                  // a call waits for it; false: prefetch or hot set
  bool arranging = false;                 // for the hot set
  GateBuffer* gates = nullptr;            // for the layer's gates, and for no slots
  std::int64_t chunk = -1, asked_ns = 0;  // for traces: the chunk that asked, and when
  std::vector<Wanted> wanted;
  std::vector<ReadRun> runs;
  std::vector<Read> reads;
  std::vector<iovec> parts;
  std::unique_ptr<char, decltype(&std::free)> between{
      nullptr, &std::free};  // receives the bytes between slots, which nobody uses
  std::int64_t left = 0;     // reads that have not ended

  // Reads of all gates of a layer, in multiples of `unit`, of at most `most` bytes each but for whole pages.
  void plan_gates(const StoreLayer& about, std::int64_t unit, std::int64_t most) {
    const std::int64_t bytes = (about.gate_bytes() + unit - 1) / unit * unit;
    const std::int64_t step = std::max(kStorePage, most / kStorePage * kStorePage);
    runs.reserve(static_cast<std::size_t>(bytes / step + 1));
    for (std::int64_t at = 0; at < bytes; at += step) {
      runs.push_back({this, at / kStorePage, 0, 0});
      Read read;
      read.offset = about.gates + at;
      read.bytes = std::min(step, bytes - at);
      read.into = gates->data.get() + at;
      read.owner = &runs.back();
      reads.push_back(read);
    }
    left = gates->left = static_cast<std::int64_t>(reads.size());
  }

  // `wanted` is ascending in the file; `read_bytes` of each slot are read to place_of(place). A read has at most `most`
  // bytes. Gaps of at most `most_between` bytes between wanted slots are read and discarded: a device needs as long for
  // a further read as for these bytes.
  template <class PlaceOf>
  void plan(const StoreLayer& about, std::int64_t read_bytes, std::int64_t most, std::int64_t most_between,
            const PlaceOf& place_of) {
    constexpr std::int64_t kMostParts = 512;  // the system takes 1024 per read
    const std::int64_t n = static_cast<std::int64_t>(wanted.size());
    const std::int64_t step = 1 + most_between / about.slot_bytes;  // largest distance in slots within one read
    runs.reserve(wanted.size());
    reads.reserve(wanted.size());
    parts.reserve(2 * wanted.size());
    const auto gap_before = [&](std::int64_t k) { return (file(k) - file(k - 1)) * about.slot_bytes - read_bytes; };
    std::int64_t between_bytes = 0;  // one buffer per run, as long as its longest gap: threads read runs at once
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
