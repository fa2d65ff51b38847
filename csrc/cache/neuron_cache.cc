#include "cache/neuron_cache.h"

#include <algorithm>

namespace pi2 {
namespace {

struct Known {
  CachePolicy policy;
  std::unique_ptr<EvictionPolicy> (*make)(CacheEntries& entries, std::int64_t keys);
  const char* name;
  std::int64_t bytes;
};

constexpr Known kKnown[] = {
#define PI2_CACHE_POLICY(enumerator, make, name, bytes) {CachePolicy::enumerator, make, name, bytes},
#include "cache/policies/list.inc"
#undef PI2_CACHE_POLICY
};

const Known& known(CachePolicy policy) { return kKnown[static_cast<std::size_t>(policy)]; }

}  // namespace

std::string policy_of(const std::string& name, CachePolicy* policy) {
  std::string names;
  for (const Known& each : kKnown) {
    if (name == each.name) {
      *policy = each.policy;
      return "";
    }
    names += (names.empty() ? "" : &each == std::end(kKnown) - 1 ? " or " : ", ") + std::string(each.name);
  }
  return "expected " + names + ", found '" + name + "'";
}

std::string name_of(CachePolicy policy) { return known(policy).name; }

std::int64_t bytes_of(CachePolicy policy) { return known(policy).bytes; }

NeuronCache::NeuronCache(std::int64_t keys, std::int64_t slots, CachePolicy policy)
    : kind_(policy),
      slot_of_(static_cast<std::size_t>(keys), -1),
      policy_(known(policy).make(entries_, keys)),
      evicts_(policy_->evicts()) {
  resize(slots);
}

std::int64_t NeuronCache::look_up(std::int64_t key) {
  const std::int32_t slot = slot_of_[static_cast<std::size_t>(key)];
  if (slot < 0) return -1;
  CacheEntry& e = entry(slot);
  e.last_use = now_;
  if (!e.fixed) policy_->used(slot);
  return slot;
}

std::int64_t NeuronCache::insert(std::int64_t key, bool fixed) {
  if (free_.empty()) {
    // pins only grow until the next begin()
    if (full_at_ == now_ || !(evicts_ || fixed || !priority_.empty())) return -1;
    const std::int32_t slot = victim();
    if (slot < 0) full_at_ = now_;
    if (slot < 0) return -1;
    policy_->evicted(slot);
    empty(slot);
    ++evictions_;
  }
  const std::int32_t slot = free_.back();
  free_.pop_back();
  CacheEntry& e = entry(slot);
  e = CacheEntry();
  e.key = key;
  e.last_use = now_;
  e.fixed = fixed;
  slot_of_[static_cast<std::size_t>(key)] = slot;
  if (!fixed) policy_->inserted(slot);
  if (!priority_.empty()) rank(slot);
  fixed_ += fixed;
  ++used_;
  ++changes_;
  return slot;
}

void NeuronCache::fix(std::int64_t key, bool fixed) {
  const std::int32_t slot = slot_of_[static_cast<std::size_t>(key)];
  if (slot < 0 || entry(slot).fixed == fixed) return;
  if (fixed) policy_->erased(slot);
  entry(slot).fixed = fixed;
  fixed_ += fixed ? 1 : -1;
  if (!fixed) policy_->inserted(slot);
  if (!fixed && !priority_.empty()) rank(slot);
}

void NeuronCache::erase(std::int64_t key) {
  const std::int32_t slot = slot_of_[static_cast<std::size_t>(key)];
  if (slot < 0) return;
  if (!entry(slot).fixed) policy_->erased(slot);
  empty(slot);
}

void NeuronCache::erase_older(std::int64_t first, std::int64_t last, std::int64_t time) {
  for (std::int64_t key = first; key < last; ++key) {
    const std::int32_t slot = slot_of_[static_cast<std::size_t>(key)];
    if (slot >= 0 && !entry(slot).fixed && !entry(slot).held && entry(slot).last_use < time) erase(key);
  }
}

void NeuronCache::renew(const std::vector<std::int64_t>& keys) {
  policy_ = known(kind_).make(entries_, static_cast<std::int64_t>(slot_of_.size()));
  begin();
  all_ranked_ = false;
  for (const std::int64_t key : keys) {
    const auto slot = static_cast<std::int32_t>(slot_of(key));
    CacheEntry& e = entry(slot);
    CacheEntry made;
    made.key = key;
    made.last_use = now_;
    made.fixed = e.fixed;
    made.held = e.held;
    e = made;
    if (!e.fixed) policy_->inserted(slot);
  }
}

void NeuronCache::prioritise(std::int64_t first, const std::vector<float>& values) {
  make_room_for_ranks(slots());
  if (priority_.empty()) priority_.resize(slot_of_.size());
  for (const float value : values) {
    const std::int32_t slot = slot_of_[static_cast<std::size_t>(first)];
    float& its = priority_[static_cast<std::size_t>(first++)];
    const bool falls = value < its;
    its = value;
    if (falls && slot >= 0 && all_ranked_) rank(slot);
  }
  full_at_ = 0;
}

void NeuronCache::forget_priorities() {
  priority_ = {};
  ranked_ = {};
  passed_ = {};
  all_ranked_ = false;
  full_at_ = 0;
}

// Later nothing may fail.
void NeuronCache::make_room_for_ranks(std::int64_t slots) {
  const auto most = static_cast<std::size_t>(slots);
  ranked_.reserve(4 * most);
  passed_.reserve(most);
  if (turns_.size() < most) turns_.resize(most);
}

void NeuronCache::rank(std::int32_t slot) {
  const CacheEntry& e = entry(slot);
  if (e.key < 0 || e.fixed) return;
  if (ranked_.size() >= 3 * entries_.size()) all_ranked_ = false;  // most are outdated
  if (!all_ranked_) return;
  ranked_.push_back(
      {priority_[static_cast<std::size_t>(e.key)], slot, e.last_use, ++turns_[static_cast<std::size_t>(slot)]});
  std::push_heap(ranked_.begin(), ranked_.end());
}

void NeuronCache::rank_all() {
  ranked_.clear();
  passed_.clear();
  for (std::int32_t slot = 0; slot < static_cast<std::int32_t>(entries_.size()); ++slot) {
    const CacheEntry& e = entry(slot);
    if (e.key >= 0 && !e.fixed)
      ranked_.push_back(
          {priority_[static_cast<std::size_t>(e.key)], slot, e.last_use, ++turns_[static_cast<std::size_t>(slot)]});
  }
  std::make_heap(ranked_.begin(), ranked_.end());
  all_ranked_ = true;
}

std::int32_t NeuronCache::least() {
  if (!all_ranked_) rank_all();
  while (!ranked_.empty()) {
    std::pop_heap(ranked_.begin(), ranked_.end());
    const Ranked next = ranked_.back();
    ranked_.pop_back();
    const CacheEntry& e = entry(next.slot);
    if (next.turn != turns_[static_cast<std::size_t>(next.slot)] || e.key < 0 || e.fixed) continue;
    if (e.last_use == now_ || e.held) {
      if (passed_.size() < entries_.size())
        passed_.push_back(next.slot);
      else
        all_ranked_ = false;
    } else if (e.last_use != next.last_use || priority_[static_cast<std::size_t>(e.key)] != next.priority) {
      rank(next.slot);
      if (!all_ranked_) rank_all();
    } else {
      return next.slot;
    }
  }
  return -1;
}

// The policy has forgotten the slot already.
void NeuronCache::empty(std::int64_t slot) {
  CacheEntry& e = entry(slot);
  slot_of_[static_cast<std::size_t>(e.key)] = -1;
  e.key = -1;
  fixed_ -= e.fixed;
  free_.push_back(static_cast<std::int32_t>(slot));
  --used_;
  ++changes_;
}

std::vector<NeuronCache::Move> NeuronCache::resize(std::int64_t slots) {
  slots = policy_->room(slots);
  const std::int64_t before = this->slots();
  if (!priority_.empty()) make_room_for_ranks(slots);
  std::vector<Move> moves;
  std::vector<std::int32_t> free;
  const std::int64_t staying = std::min(used_, slots);
  moves.reserve(static_cast<std::size_t>(std::min(staying, std::max<std::int64_t>(0, before - slots))));
  free.reserve(static_cast<std::size_t>(slots));
  free_.reserve(static_cast<std::size_t>(before));
  CacheEntries kept;
  kept.reserve(static_cast<std::size_t>(slots));
  begin();
  ++changes_;
  for (std::int64_t last = before - 1; used_ > slots; ++evictions_) {
    std::int32_t slot = victim();
    if (slot >= 0) {
      policy_->evicted(slot);
    } else {  // everything left is fixed
      while (entry(last).key < 0) --last;
      slot = static_cast<std::int32_t>(last);
    }
    empty(slot);
  }
  std::int64_t to = 0;
  for (std::int64_t from = slots; from < before; ++from) {
    if (entry(from).key < 0) continue;
    while (entry(to).key >= 0) ++to;
    const Move move{static_cast<std::int32_t>(from), static_cast<std::int32_t>(to)};
    entry(to) = entry(from);
    entry(from).key = -1;
    slot_of_[static_cast<std::size_t>(entry(to).key)] = move.to;
    if (!entry(to).fixed) policy_->moved(move.from, move.to);
    moves.push_back(move);
  }
  kept.assign(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(std::min(before, slots)));
  kept.resize(static_cast<std::size_t>(slots));
  entries_.swap(kept);  // the policy refers to the vector, not to its memory
  for (std::int64_t slot = slots - 1; slot >= 0; --slot)
    if (entry(slot).key < 0) free.push_back(static_cast<std::int32_t>(slot));
  free_.swap(free);
  all_ranked_ = false;
  return moves;
}

}  // namespace pi2
