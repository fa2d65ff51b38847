// Eviction policies of the neuron cache. Pure bookkeeping and deterministic: the same calls evict the same keys on
// every machine.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace pi2 {

struct CacheEntry {
  std::int64_t key = -1, last_use = 0;
  std::int32_t before = -1, after = -1;  // in a list of the policy, newest first
  std::uint8_t uses = 0, queue = 0;      // for the policy
  bool fixed = false, held = false;
};

// By slot.
using CacheEntries = std::vector<CacheEntry>;

// Sees only entries that are not fixed. An entry's key is set during every call about it.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // How many of `slots` slots the policy uses.
  virtual std::int64_t room(std::int64_t slots) const { return slots; }

  // Whether a new key may evict another one.
  virtual bool evicts() const { return true; }

  // A new call begins: nothing is pinned.
  virtual void begin() {}

  virtual void used(std::int32_t slot) = 0;
  virtual void inserted(std::int32_t slot) = 0;
  virtual void erased(std::int32_t slot) = 0;
  virtual void evicted(std::int32_t slot) { erased(slot); }  // to make room
  virtual void moved(std::int32_t from, std::int32_t to) = 0;

  // The slot to evict next: neither used at `now` (that is, since begin()) nor held; -1: none.
  virtual std::int32_t victim(std::int64_t now) = 0;
};

// A list of slots, newest first.
struct SlotList {
  std::int32_t newest = -1, oldest = -1;
  std::int64_t size = 0;

  void push_front(CacheEntries& entries, std::int32_t slot) {
    CacheEntry& e = entries[static_cast<std::size_t>(slot)];
    e.before = -1;
    e.after = newest;
    (newest < 0 ? oldest : entries[static_cast<std::size_t>(newest)].before) = slot;
    newest = slot;
    ++size;
  }

  void unlink(CacheEntries& entries, std::int32_t slot) {
    const CacheEntry& e = entries[static_cast<std::size_t>(slot)];
    (e.before < 0 ? newest : entries[static_cast<std::size_t>(e.before)].after) = e.after;
    (e.after < 0 ? oldest : entries[static_cast<std::size_t>(e.after)].before) = e.before;
    --size;
  }

  // An entry of this list has been copied from slot `from` to slot `to`.
  void moved(CacheEntries& entries, std::int32_t from, std::int32_t to) {
    const CacheEntry& e = entries[static_cast<std::size_t>(to)];
    (e.before < 0 ? newest : entries[static_cast<std::size_t>(e.before)].after) = to;
    (e.after < 0 ? oldest : entries[static_cast<std::size_t>(e.after)].before) = to;
    if (newest == from) newest = to;
    if (oldest == from) oldest = to;
  }

  // Moves all of `other` to the new end of this list.
  void append_newer(CacheEntries& entries, SlotList* other) {
    if (other->size == 0) return;
    if (size == 0) {
      *this = *other;
    } else {
      entries[static_cast<std::size_t>(newest)].before = other->oldest;
      entries[static_cast<std::size_t>(other->oldest)].after = newest;
      newest = other->newest;
      size += other->size;
    }
    *other = SlotList();
  }
};

#define PI2_CACHE_POLICY(enumerator, make, name, bytes) \
  std::unique_ptr<EvictionPolicy> make(CacheEntries& entries, std::int64_t keys);
#include "cache/policies/list.inc"
#undef PI2_CACHE_POLICY

}  // namespace pi2
