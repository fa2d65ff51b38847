// S3-FIFO (Yang et al., SOSP 2023), three queues: new keys enter a small queue, a tenth of the cache. They reach the
// main queue if they are used twice in the small one, or if they were evicted from it not long ago (the ghost queue
// remembers keys without bytes, as many as the main queue has). Keys used in the main queue go round again.
#include <algorithm>

#include "cache/policies/policy.h"

namespace pi2 {
namespace {

class S3Fifo final : public EvictionPolicy {
 public:
  S3Fifo(CacheEntries& entries, std::int64_t keys) : entries_(entries), ghosts_(static_cast<std::size_t>(keys), 0) {}

  void used(std::int32_t slot) override {
    CacheEntry& e = at(slot);
    e.uses = static_cast<std::uint8_t>(std::min(e.uses + 1, kMostUses));
  }

  void inserted(std::int32_t slot) override {
    std::uint32_t& ghost = ghosts_[static_cast<std::size_t>(at(slot).key)];
    const bool known = ghost != 0 && std::int64_t{evictions_ - ghost} < listed() * 9 / 10;
    ghost = 0;
    put(slot, known ? kMain : kSmall);
  }

  void erased(std::int32_t slot) override { queues_[at(slot).queue].unlink(entries_, slot); }

  void evicted(std::int32_t slot) override {
    if (at(slot).queue == kSmall) {
      if (++evictions_ == 0) ++evictions_;  // wraps after 2^32 evictions; a wrong ghost then does no harm
      ghosts_[static_cast<std::size_t>(at(slot).key)] = evictions_;
    }
    erased(slot);
  }

  void moved(std::int32_t from, std::int32_t to) override { queues_[at(to).queue].moved(entries_, from, to); }

  std::int32_t victim(std::int64_t now) override {
    const bool small_first = 10 * queues_[kSmall].size >= listed();
    std::int32_t slot = small_first ? from_small(now) : from_main(now);
    if (slot < 0) slot = small_first ? from_main(now) : from_small(now);
    if (slot < 0) slot = from_main(now);  // the main queue may have received some from the small one
    return slot;
  }

 private:
  static constexpr std::uint8_t kSmall = 0, kMain = 1;
  static constexpr int kMostUses = 3;

  CacheEntry& at(std::int32_t slot) { return entries_[static_cast<std::size_t>(slot)]; }
  std::int64_t listed() const { return queues_[kSmall].size + queues_[kMain].size; }
  bool stays(const CacheEntry& e, std::int64_t now) const { return e.last_use == now || e.held; }

  void put(std::int32_t slot, std::uint8_t queue) {
    at(slot).queue = queue;
    queues_[queue].push_front(entries_, slot);
  }

  void go_round(std::int32_t slot) {
    const std::uint8_t queue = at(slot).queue;
    queues_[queue].unlink(entries_, slot);
    put(slot, queue);
  }

  // Pinned and held entries go round, so that the next search does not meet them first. A queue with no others is not
  // searched again before the next call.
  std::int32_t from_small(std::int64_t now) {
    if (stuck_at_[kSmall] == now) return -1;
    for (std::int64_t steps = queues_[kSmall].size; steps > 0; --steps) {
      const std::int32_t slot = queues_[kSmall].oldest;
      if (stays(at(slot), now)) {
        go_round(slot);
      } else if (at(slot).uses > 1) {
        queues_[kSmall].unlink(entries_, slot);
        at(slot).uses = 0;
        put(slot, kMain);
        stuck_at_[kMain] = 0;
      } else {
        return slot;
      }
    }
    stuck_at_[kSmall] = now;
    return -1;
  }

  std::int32_t from_main(std::int64_t now) {
    if (stuck_at_[kMain] == now) return -1;
    for (std::int64_t stuck = 0; stuck < queues_[kMain].size;) {
      const std::int32_t slot = queues_[kMain].oldest;
      if (stays(at(slot), now)) {
        ++stuck;
      } else {
        if (at(slot).uses == 0) return slot;
        --at(slot).uses;
        stuck = 0;
      }
      go_round(slot);
    }
    stuck_at_[kMain] = now;
    return -1;
  }

  CacheEntries& entries_;
  SlotList queues_[2];
  std::vector<std::uint32_t> ghosts_;  // by key: number of its eviction from the small queue, or 0
  std::uint32_t evictions_ = 0;        // from the small queue
  std::int64_t stuck_at_[2] = {0, 0};
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_s3_fifo(CacheEntries& entries, std::int64_t keys) {
  return std::make_unique<S3Fifo>(entries, keys);
}

}  // namespace pi2
