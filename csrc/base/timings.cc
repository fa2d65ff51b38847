#include "base/timings.h"

#include <atomic>

namespace pi2 {
namespace {

// Open addressing; entries are never removed. The key is kind + 1, rows and columns in 2, 31 and 31 bits.
struct Entry {
  std::atomic<std::uint64_t> key{0};
  std::atomic<std::int64_t> calls{0}, nanoseconds{0};
};

constexpr std::uint64_t kMask31 = (std::uint64_t{1} << 31) - 1;
Entry entries[kTimings];

std::uint64_t key_of(std::int64_t kind, std::int64_t rows, std::int64_t columns) {
  return (static_cast<std::uint64_t>(kind) + 1) << 62 | (static_cast<std::uint64_t>(rows) & kMask31) << 31 |
         (static_cast<std::uint64_t>(columns) & kMask31);
}

}  // namespace

void add_timing(std::int64_t kind, std::int64_t rows, std::int64_t columns, std::int64_t nanoseconds) {
  const std::uint64_t key = key_of(kind, rows, columns);
  // The last entry takes sizes that found no free entry.
  constexpr std::uint64_t kOwned = kTimings - 1;
  Entry* mine = &entries[kOwned];
  std::uint64_t place = (key * 0x9E3779B97F4A7C15u >> 32) % kOwned;
  for (std::uint64_t tries = 0; tries < kOwned; ++tries, place = place + 1 == kOwned ? 0 : place + 1) {
    std::uint64_t found = entries[place].key.load(std::memory_order_relaxed);
    if (found == 0 && entries[place].key.compare_exchange_strong(found, key, std::memory_order_relaxed)) found = key;
    if (found == key) {
      mine = &entries[place];
      break;
    }
  }
  mine->calls.fetch_add(1, std::memory_order_relaxed);
  mine->nanoseconds.fetch_add(nanoseconds, std::memory_order_relaxed);
}

std::int64_t read_timings(Timing* out) {
  std::int64_t n = 0;
  for (std::int64_t i = 0; i < kTimings; ++i) {
    const Entry& entry = entries[i];
    const std::int64_t calls = entry.calls.load(std::memory_order_relaxed);
    if (calls == 0) continue;
    const std::uint64_t key = entry.key.load(std::memory_order_relaxed);
    Timing timing;
    timing.kind = key == 0 ? 3 : static_cast<std::int64_t>(key >> 62) - 1;
    timing.rows = static_cast<std::int64_t>(key >> 31 & kMask31);
    timing.columns = static_cast<std::int64_t>(key & kMask31);
    timing.calls = calls;
    timing.nanoseconds = entry.nanoseconds.load(std::memory_order_relaxed);
    out[n++] = timing;
  }
  return n;
}

void reset_timings() {
  for (Entry& entry : entries) {
    entry.calls.store(0, std::memory_order_relaxed);
    entry.nanoseconds.store(0, std::memory_order_relaxed);
  }
}

}  // namespace pi2
