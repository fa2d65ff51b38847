// Never evicts for a new key: what was cached first stays. If the cache shrinks, the oldest leave first, because
// filling a cache inserts the most frequent keys last.
#include "cache/policies/policy.h"

namespace pi2 {
namespace {

class Static final : public EvictionPolicy {
 public:
  explicit Static(CacheEntries& entries) : entries_(entries) {}

  bool evicts() const override { return false; }
  void used(std::int32_t) override {}
  void inserted(std::int32_t slot) override { list_.push_front(entries_, slot); }
  void erased(std::int32_t slot) override { list_.unlink(entries_, slot); }
  void moved(std::int32_t from, std::int32_t to) override { list_.moved(entries_, from, to); }

  std::int32_t victim(std::int64_t now) override {
    const auto stays = [&](const CacheEntry& e) { return e.last_use == now || e.held; };
    std::int32_t slot = list_.oldest;
    while (slot >= 0 && stays(entries_[static_cast<std::size_t>(slot)]))
      slot = entries_[static_cast<std::size_t>(slot)].before;
    return slot;
  }

 private:
  CacheEntries& entries_;
  SlotList list_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_static(CacheEntries& entries, std::int64_t) {
  return std::make_unique<Static>(entries);
}

}  // namespace pi2
