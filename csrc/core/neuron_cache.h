// Which neurons are in memory. Pure bookkeeping, so that it can be replayed on traces: no bytes, no threads, no clock.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pi2 {

enum class CachePolicy {
  kLru,     // evicts what was used longest ago
  kSieve,   // evicts the oldest that was not used since the hand last passed: scans do not flush what is used often
  kStatic,  // evicts nothing: what came first stays
};

// "" and the policy, or what is wrong with the name.
std::string policy_of(const std::string& name, CachePolicy* policy);

// A fixed number of slots for keys 0..keys - 1. What was looked up or inserted since begin() is pinned: never evicted.
class NeuronCache {
 public:
  NeuronCache(std::int64_t keys, std::int64_t slots, CachePolicy policy);

  // A new use of several keys begins; pins of the one before end.
  void begin() { ++now_; }

  // The slot of a key, which is used and pinned by this; -1 if it is not there.
  std::int64_t look_up(std::int64_t key);

  // A slot for a key that is not there, by evicting another if need be; -1 if every slot is pinned or the policy evicts
  // nothing. `fixed`: it is never evicted, whatever the policy (the hot region).
  std::int64_t insert(std::int64_t key, bool fixed = false);

  // The slot's bytes are on their way: it is nobody's victim until they are there, however long ago it was asked for.
  void hold(std::int64_t slot) { entry(slot).held = true; }
  void let_go(std::int64_t slot) { entry(slot).held = false; }

  // Tells the processor that the key is going to be looked up.
  void expect(std::int64_t key) const {
    const std::int32_t slot = slot_of_[static_cast<std::size_t>(key)];
    if (slot >= 0) __builtin_prefetch(&entries_[static_cast<std::size_t>(slot)], 1);
  }

  // Makes a key absent (its bytes never came).
  void erase(std::int64_t key);

  // Erases the keys of [first, last) that were last used before `time` (as now() was then).
  void erase_older(std::int64_t first, std::int64_t last, std::int64_t time);

  // As look_up, but not a use.
  std::int64_t slot_of(std::int64_t key) const { return slot_of_[static_cast<std::size_t>(key)]; }

  bool contains(std::int64_t key) const { return slot_of_[static_cast<std::size_t>(key)] >= 0; }
  std::int64_t slots() const { return static_cast<std::int64_t>(entries_.size()); }
  std::int64_t used() const { return used_; }
  std::int64_t fixed() const { return used_ - listed_; }
  std::int64_t evictions() const { return evictions_; }
  std::int64_t now() const { return now_; }

 private:
  struct Entry {
    std::int64_t key = -1, last_use = 0;
    std::int32_t before = -1, after = -1;  // in the list, newest first
    bool visited = false, fixed = false, held = false;
  };

  Entry& entry(std::int64_t slot) { return entries_[static_cast<std::size_t>(slot)]; }
  void unlink(std::int64_t slot);
  void push_front(std::int64_t slot);
  std::int64_t victim();
  void evict(std::int64_t slot);

  CachePolicy policy_;
  std::vector<std::int32_t> slot_of_;  // by key
  std::vector<Entry> entries_;
  std::vector<std::int32_t> free_;
  std::int32_t newest_ = -1, oldest_ = -1, hand_ = -1;
  std::int64_t now_ = 1, used_ = 0, listed_ = 0, evictions_ = 0;
  std::int64_t full_at_ = 0;  // the time at which every slot was found pinned
};

}  // namespace pi2
