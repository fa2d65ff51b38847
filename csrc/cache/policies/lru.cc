// Least recently used.
#include "cache/policies/policy.h"

namespace pi2 {
namespace {

class Lru final : public EvictionPolicy {
 public:
  explicit Lru(CacheEntries& entries) : entries_(entries) {}

  void used(std::int32_t slot) override {
    if (slot == list_.newest) return;
    list_.unlink(entries_, slot);
    list_.push_front(entries_, slot);
  }
  void inserted(std::int32_t slot) override { list_.push_front(entries_, slot); }
  void erased(std::int32_t slot) override { list_.unlink(entries_, slot); }
  void moved(std::int32_t from, std::int32_t to) override { list_.moved(entries_, from, to); }

  std::int32_t victim(std::int64_t now) override {
    // Pinned entries are the newest. Meeting one means that all older entries are held.
    std::int32_t slot = list_.oldest;
    while (slot >= 0 && at(slot).held && at(slot).last_use != now) slot = at(slot).before;
    return slot >= 0 && at(slot).last_use != now ? slot : -1;
  }

 private:
  const CacheEntry& at(std::int32_t slot) const { return entries_[static_cast<std::size_t>(slot)]; }

  CacheEntries& entries_;
  SlotList list_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_lru(CacheEntries& entries, std::int64_t) { return std::make_unique<Lru>(entries); }

}  // namespace pi2
