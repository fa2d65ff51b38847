// The chunks of a call: which slots each one misses, which chunks are complete, and which is computed next.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "engine/read_batch.h"

namespace pi2 {

// A slot of the file belongs to one chunk: the chunk size is a multiple of the cluster size.
struct Chunk {
  const std::int64_t* ids = nullptr;
  std::int64_t count = 0;
  std::vector<std::int64_t> missing;  // slots of the file
  std::size_t asked = 0;              // how many of `missing` have a read in flight or done
  std::int64_t on_the_way = 0;        // slots whose read has not ended
  std::vector<std::int32_t> spares;   // places to return after the chunk
  std::vector<Wanted> to_keep;        // spares whose contents then move into the cache

  bool there() const { return on_the_way == 0 && asked == missing.size(); }
};

struct Chunks {
  std::vector<Chunk> all;
  std::deque<std::int64_t> ready, waiting;  // complete; with missing slots that have no read yet
  std::int64_t given = 0, finished = 0, total = 0;

  Chunk& operator[](std::int64_t c) { return all[static_cast<std::size_t>(c)]; }
  const Chunk& operator[](std::int64_t c) const { return all[static_cast<std::size_t>(c)]; }

  void expect(std::int64_t n) {
    all.assign(static_cast<std::size_t>(n), Chunk());
    ready.clear();
    waiting.clear();
    given = finished = 0;
    total = n;
  }

  void forget() {
    all.clear();
    given = finished = total = 0;
  }

  std::int64_t neurons() const {
    std::int64_t sum = 0;
    for (const Chunk& chunk : all) sum += chunk.count;
    return sum;
  }

  // A prefetched slot that chunk c waits for has failed: the chunk reads it itself.
  void missed(std::int64_t c, std::int64_t in_file) {
    Chunk& chunk = (*this)[c];
    chunk.missing.push_back(in_file);
    std::sort(chunk.missing.begin() + static_cast<std::ptrdiff_t>(chunk.asked), chunk.missing.end());
    // Sorted: streamed chunks are given out in order, and the first waiting chunk always makes progress.
    const auto at = std::lower_bound(waiting.begin(), waiting.end(), c);
    if (at == waiting.end() || *at != c) waiting.insert(at, c);
  }

  // `stream`: chunks are given out in order; otherwise as they become complete.
  bool next_is_there(bool stream) const { return stream ? (*this)[given].there() : !ready.empty(); }
  std::int64_t take(bool stream) {
    const std::int64_t c = stream ? given : ready.front();
    if (!stream) ready.pop_front();
    ++given;
    return c;
  }
};

}  // namespace pi2
