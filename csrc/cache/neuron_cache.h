// Which neurons are in memory. Pure bookkeeping, so that it can be replayed on traces: no bytes, no threads, no clock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
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

// Finds a policy by name. Returns "" or an error message.
std::string policy_of(const std::string& name, CachePolicy* policy);
std::string name_of(CachePolicy policy);
std::int64_t bytes_of(CachePolicy policy);  // memory of the policy for each neuron of the store

// A cache of `slots` slots for keys 0 .. keys - 1. Keys looked up or inserted since begin() are pinned: never evicted.
class NeuronCache {
 public:
  NeuronCache(std::int64_t keys, std::int64_t slots, CachePolicy policy);
  NeuronCache(const NeuronCache&) = delete;
  NeuronCache& operator=(const NeuronCache&) = delete;

  // A new call begins: the pins of the last one end.
  void begin() {
    ++now_;
    policy_->begin();
    for (const std::int32_t slot : passed_) rank(slot);
    passed_.clear();
  }

  // The slot of a key, or -1. Counts as a use and pins the key.
  std::int64_t look_up(std::int64_t key);

  // Inserts a key that is not in the cache; evicts another if needed. Returns its slot, or -1 if every slot is pinned
  // or the policy evicts nothing. `fixed` (hot set): never evicted, and admitted whatever the policy.
  std::int64_t insert(std::int64_t key, bool fixed = false);

  // Fixes or unfixes a key, if it is in the cache.
  void fix(std::int64_t key, bool fixed);

  // hold(): a read into the slot is in flight; it is not evicted until let_go().
  void hold(std::int64_t slot) { entry(slot).held = true; }
  void let_go(std::int64_t slot) { entry(slot).held = false; }

  // Processor prefetch for a key that will be looked up soon.
  void expect(std::int64_t key) const {
    const std::int32_t slot = slot_of_[static_cast<std::size_t>(key)];
    if (slot >= 0) __builtin_prefetch(&entries_[static_cast<std::size_t>(slot)], 1);
  }

  // Removes a key (its read failed).
  void erase(std::int64_t key);

  // Removes the keys of [first, last) whose last use was before `time` (a value of now()).
  void erase_older(std::int64_t first, std::int64_t last, std::int64_t time);

  struct Move {
    std::int32_t from = 0, to = 0;
  };
  // Changes the number of slots; nothing may be held, and pins end. The policy chooses what is evicted; fixed keys go
  // last. Entries in slots that disappear move: returns the moves, each slot at most once. If it throws std::bad_alloc,
  // nothing has changed.
  std::vector<Move> resize(std::int64_t slots);

  // Resets the order to that of a new cache into which `keys` were inserted in this order; they are what it holds.
  void renew(const std::vector<std::int64_t>& keys);

  // Evicts from now on the key of the least value, among equals the least recently used, whatever the policy. Sets the
  // values of the keys from `first` on; those that were never set are 0. If it throws std::bad_alloc, nothing changed.
  void prioritise(std::int64_t first, const std::vector<float>& values);
  // The policy decides again.
  void forget_priorities();

  // As look_up, but does not count as a use.
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
  // Increases whenever a key is inserted, removed or moved.
  std::int64_t changes() const { return changes_; }

 private:
  // When a key was ranked. Keys whose value has fallen since are ranked anew, other changes are noticed later.
  struct Ranked {
    float priority;
    std::int32_t slot;
    std::int64_t last_use;
    std::uint32_t turn;  // that of its slot, unless the slot was ranked again

    bool operator<(const Ranked& other) const {  // is evicted later
      return std::tie(priority, last_use, slot) > std::tie(other.priority, other.last_use, other.slot);
    }
  };

  CacheEntry& entry(std::int64_t slot) { return entries_[static_cast<std::size_t>(slot)]; }
  void empty(std::int64_t slot);
  std::int32_t victim() { return priority_.empty() ? policy_->victim(now_) : least(); }
  std::int32_t least();
  void rank(std::int32_t slot);
  void rank_all();
  void make_room_for_ranks(std::int64_t slots);

  CachePolicy kind_;
  std::vector<std::int32_t> slot_of_;  // by key
  CacheEntries entries_;
  std::unique_ptr<EvictionPolicy> policy_;
  bool evicts_;
  std::vector<std::int32_t> free_;
  std::int64_t now_ = 1, used_ = 0, fixed_ = 0, evictions_ = 0, changes_ = 0;
  std::int64_t full_at_ = 0;          // now() when every slot was found pinned
  std::vector<float> priority_;       // by key; empty: the policy decides
  std::vector<Ranked> ranked_;        // a heap, the next to evict on top
  std::vector<std::uint32_t> turns_;  // by slot
  std::vector<std::int32_t> passed_;  // slots that were next, but pinned or held
  bool all_ranked_ = false;
};

}  // namespace pi2
