// Which neurons are in memory. Pure bookkeeping, so that it can be replayed on traces: no bytes, no threads, no clock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/policies/policy.h"

namespace pi2 {

enum class CachePolicy {
#define PI2_CACHE_POLICY(enumerator, make, name, bytes) enumerator,
#include "cache/policies/list.inc"
#undef PI2_CACHE_POLICY
};

constexpr CachePolicy kCachePolicies[] = {
#define PI2_CACHE_POLICY(enumerator, make, name, bytes) CachePolicy::enumerator,
#include "cache/policies/list.inc"
#undef PI2_CACHE_POLICY
};

// "" and the policy, or what is wrong with the name.
std::string policy_of(const std::string& name, CachePolicy* policy);
std::string name_of(CachePolicy policy);
std::int64_t bytes_of(CachePolicy policy);  // of each neuron of the store

// A number of slots for keys 0..keys - 1. What was looked up or inserted since begin() is pinned: never evicted.
class NeuronCache {
 public:
  NeuronCache(std::int64_t keys, std::int64_t slots, CachePolicy policy);
  NeuronCache(const NeuronCache&) = delete;
  NeuronCache& operator=(const NeuronCache&) = delete;

  // A new use of several keys begins; pins of the one before end.
  void begin() {
    ++now_;
    policy_->begin();
  }

  // The slot of a key, which is used and pinned by this; -1 if it is not there.
  std::int64_t look_up(std::int64_t key);

  // A slot for a key that is not there, by evicting another if need be; -1 if every slot is pinned or the policy evicts
  // nothing. `fixed`: it is never evicted, whatever the policy (the hot region), and is let in by every policy.
  std::int64_t insert(std::int64_t key, bool fixed = false);

  // From now on a key that is there is fixed, or no longer.
  void fix(std::int64_t key, bool fixed);

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

  struct Move {
    std::int32_t from = 0, to = 0;
  };
  // Another number of slots; nothing is held, and pins end. Of what has no room any more the policy says what leaves,
  // fixed keys last. What stays in slots that go moves: returns from where to where, no slot twice. Throws
  // std::bad_alloc, and nothing has changed.
  std::vector<Move> resize(std::int64_t slots);

  // What is there is `keys`: from now on as in a new cache into which they were inserted in this order.
  void renew(const std::vector<std::int64_t>& keys);

  // As look_up, but not a use.
  std::int64_t slot_of(std::int64_t key) const { return slot_of_[static_cast<std::size_t>(key)]; }

  bool contains(std::int64_t key) const { return slot_of_[static_cast<std::size_t>(key)] >= 0; }
  bool is_fixed(std::int64_t key) const {
    return contains(key) && entries_[static_cast<std::size_t>(slot_of(key))].fixed;
  }
  std::int64_t keys() const { return static_cast<std::int64_t>(slot_of_.size()); }
  std::int64_t slots() const { return static_cast<std::int64_t>(entries_.size()); }
  std::int64_t used() const { return used_; }
  std::int64_t fixed() const { return fixed_; }
  std::int64_t evictions() const { return evictions_; }
  std::int64_t now() const { return now_; }
  // Grows whenever a key comes, goes or moves.
  std::int64_t changes() const { return changes_; }

 private:
  CacheEntry& entry(std::int64_t slot) { return entries_[static_cast<std::size_t>(slot)]; }
  void empty(std::int64_t slot);

  CachePolicy kind_;
  std::vector<std::int32_t> slot_of_;  // by key
  CacheEntries entries_;
  std::unique_ptr<EvictionPolicy> policy_;
  bool evicts_;
  std::vector<std::int32_t> free_;
  std::int64_t now_ = 1, used_ = 0, fixed_ = 0, evictions_ = 0, changes_ = 0;
  std::int64_t full_at_ = 0;  // the time at which every slot was found pinned
};

}  // namespace pi2
