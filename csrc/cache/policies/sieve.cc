// SIEVE (Zhang et al., NSDI 2024): a hand goes round from old to new and evicts the first entry not used since it last
// passed. Scans do not flush what is used often.
#include "cache/policies/policy.h"

namespace pi2 {
namespace {

class Sieve final : public EvictionPolicy {
 public:
  explicit Sieve(CacheEntries& entries) : entries_(entries) {}

  void used(std::int32_t slot) override { at(slot).uses = 1; }
  void inserted(std::int32_t slot) override { list_.push_front(entries_, slot); }
  void erased(std::int32_t slot) override {
    if (hand_ == slot) hand_ = at(slot).before;
    list_.unlink(entries_, slot);
  }
  void moved(std::int32_t from, std::int32_t to) override {
    list_.moved(entries_, from, to);
    if (hand_ == from) hand_ = to;
  }

  std::int32_t victim(std::int64_t now) override {
    const std::int32_t start = hand_;
    // At most two rounds: one clears marks, one finds an entry; pinned entries keep their marks.
    for (std::int64_t steps = 2 * list_.size; steps >= 0; --steps) {
      if (hand_ < 0) hand_ = list_.oldest;
      if (hand_ < 0) return -1;
      CacheEntry& e = at(hand_);
      if (e.last_use != now && !e.held) {
        if (e.uses == 0) return hand_;
        e.uses = 0;
      }
      hand_ = e.before;
    }
    hand_ = start;
    return -1;
  }

 private:
  CacheEntry& at(std::int32_t slot) { return entries_[static_cast<std::size_t>(slot)]; }

  CacheEntries& entries_;
  SlotList list_;
  std::int32_t hand_ = -1;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_sieve(CacheEntries& entries, std::int64_t) {
  return std::make_unique<Sieve>(entries);
}

}  // namespace pi2
