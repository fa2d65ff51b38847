#include "core/neuron_cache.h"

namespace pi2 {

std::string policy_of(const std::string& name, CachePolicy* policy) {
  if (name == "lru")
    *policy = CachePolicy::kLru;
  else if (name == "sieve")
    *policy = CachePolicy::kSieve;
  else if (name == "static")
    *policy = CachePolicy::kStatic;
  else
    return "expected lru, sieve or static, found '" + name + "'";
  return "";
}

NeuronCache::NeuronCache(std::int64_t keys, std::int64_t slots, CachePolicy policy)
    : policy_(policy), slot_of_(static_cast<std::size_t>(keys), -1), entries_(static_cast<std::size_t>(slots)) {
  for (std::int64_t slot = slots - 1; slot >= 0; --slot) free_.push_back(static_cast<std::int32_t>(slot));
}

std::int64_t NeuronCache::look_up(std::int64_t key) {
  const std::int64_t slot = slot_of_[static_cast<std::size_t>(key)];
  if (slot < 0) return -1;
  entry(slot).last_use = now_;
  entry(slot).visited = true;
  if (policy_ == CachePolicy::kLru && slot != newest_ && !entry(slot).fixed) {
    unlink(slot);
    push_front(slot);
  }
  return slot;
}

std::int64_t NeuronCache::insert(std::int64_t key, bool fixed) {
  if (free_.empty()) {
    if (full_at_ == now_) return -1;  // pins only grow until the next begin()
    const std::int64_t slot = victim();
    if (slot < 0) full_at_ = now_;
    if (slot < 0) return -1;
    evict(slot);
    ++evictions_;
  }
  const std::int64_t slot = free_.back();
  free_.pop_back();
  Entry& e = entry(slot);
  e.key = key;
  e.last_use = now_;
  e.visited = false;
  e.fixed = fixed;
  e.held = false;
  slot_of_[static_cast<std::size_t>(key)] = static_cast<std::int32_t>(slot);
  if (!fixed) push_front(slot);  // what is in no list is nobody's victim
  ++used_;
  return slot;
}

void NeuronCache::erase(std::int64_t key) {
  const std::int64_t slot = slot_of_[static_cast<std::size_t>(key)];
  if (slot >= 0) evict(slot);
}

void NeuronCache::erase_older(std::int64_t first, std::int64_t last, std::int64_t time) {
  for (std::int64_t key = first; key < last; ++key) {
    const std::int64_t slot = slot_of_[static_cast<std::size_t>(key)];
    if (slot >= 0 && !entry(slot).fixed && !entry(slot).held && entry(slot).last_use < time) evict(slot);
  }
}

void NeuronCache::evict(std::int64_t slot) {
  if (hand_ == slot) hand_ = entry(slot).before;
  if (!entry(slot).fixed) unlink(slot);
  slot_of_[static_cast<std::size_t>(entry(slot).key)] = -1;
  entry(slot).key = -1;
  free_.push_back(static_cast<std::int32_t>(slot));
  --used_;
}

void NeuronCache::unlink(std::int64_t slot) {
  --listed_;
  const Entry& e = entry(slot);
  (e.before < 0 ? newest_ : entry(e.before).after) = e.after;
  (e.after < 0 ? oldest_ : entry(e.after).before) = e.before;
}

void NeuronCache::push_front(std::int64_t slot) {
  ++listed_;
  Entry& e = entry(slot);
  e.before = -1;
  e.after = newest_;
  (newest_ < 0 ? oldest_ : entry(newest_).before) = static_cast<std::int32_t>(slot);
  newest_ = static_cast<std::int32_t>(slot);
}

std::int64_t NeuronCache::victim() {
  switch (policy_) {
    case CachePolicy::kStatic: return -1;
    case CachePolicy::kLru: {
      // Pinned entries are the newest: the first of them means that all others are held.
      std::int32_t slot = oldest_;
      while (slot >= 0 && entry(slot).held && entry(slot).last_use != now_) slot = entry(slot).before;
      return slot >= 0 && entry(slot).last_use != now_ ? slot : -1;
    }
    case CachePolicy::kSieve: break;
  }
  // Twice round at most: once to clear marks, once to find one; pinned entries keep theirs.
  for (std::int64_t steps = 2 * listed_; steps >= 0; --steps) {
    if (hand_ < 0) hand_ = oldest_;
    if (hand_ < 0) return -1;
    Entry& e = entry(hand_);
    if (e.last_use != now_ && !e.held) {
      if (!e.visited) return hand_;
      e.visited = false;
    }
    hand_ = e.before;
  }
  return -1;
}

}  // namespace pi2
