// Memory for neurons. A *slot of the file* holds one cluster of neurons (usually one neuron). A *place* is memory for
// one slot: first the places of the cache, which outlive calls, then spares for slots that the cache has no room for.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/arena.h"
#include "cache/neuron_cache.h"
#include "engine/layout.h"
#include "engine/lock.h"
#include "pi2/offload.h"

namespace pi2 {

class Places {
 public:
  // Returns "" or an error message. A mapped store has no places.
  std::string set_up(const Layout& layout, const OffloadOptions& options, CachePolicy policy) PI2_REQUIRES(kLock);

  char* at(std::int64_t place) const { return memory_.data() + place * bytes_; }
  std::int64_t bytes() const { return bytes_; }  // of a place
  std::int64_t most_slots() const { return most_slots_; }
  std::int64_t spares() const { return n_spares_; }

  NeuronCache& cache() PI2_REQUIRES(kLock) { return *cache_; }
  // Changes the number of cache slots. Nothing may be in flight: places move.
  void resize(std::int64_t slots) PI2_REQUIRES(kLock);

  // A read into the place is in flight.
  bool loading(std::int64_t place) const PI2_REQUIRES(kLock) { return about(place).loading; }
  // It was prefetched and has not been used yet.
  bool guessed(std::int64_t place) const PI2_REQUIRES(kLock) { return about(place).guess; }
  void wanted(std::int64_t place) PI2_REQUIRES(kLock) { about(place).guess = false; }
  void wait_for(std::int64_t place, std::int64_t chunk) PI2_REQUIRES(kLock) {
    about(place).waiter = static_cast<std::int16_t>(chunk);
  }
  void nobody_waits() PI2_REQUIRES(kLock) {
    for (About& place : about_) place.waiter = -1;
  }

  // A read into it starts: a prefetch (`guess`), or for a chunk, or (-1) for the hot set.
  void begin(std::int64_t place, bool guess, std::int64_t chunk = -1) PI2_REQUIRES(kLock) {
    if (place < most_slots_) cache_->hold(place);
    about(place) = {true, guess, false, static_cast<std::int16_t>(chunk)};
  }
  // They are there, or never will be: the chunk that waited for them, or -1.
  std::int16_t end(std::int64_t place) PI2_REQUIRES(kLock) {
    about(place).loading = false;
    if (place < cache_->slots()) cache_->let_go(place);
    const std::int16_t chunk = about(place).waiter;
    about(place).waiter = -1;
    return chunk;
  }
  // Nothing of this key is in its place, nor on its way there.
  void empty(std::int64_t key, std::int64_t place) PI2_REQUIRES(kLock) {
    about(place).loading = about(place).guess = false;
    about(place).waiter = -1;
    if (cache_->slot_of(key) == place) cache_->erase(key);
  }

  bool is_spare(std::int64_t place) const { return place >= most_slots_; }
  std::size_t free_spares() const PI2_REQUIRES(kLock) { return free_spares_.size(); }
  std::int32_t take_spare() PI2_REQUIRES(kLock) {
    const std::int32_t place = free_spares_.back();
    free_spares_.pop_back();
    return place;
  }
  // Returns spares with no read in flight. Never allocates: the list had room for all of them at the start.
  void give_back(std::int32_t spare) PI2_REQUIRES(kLock) { free_spares_.push_back(spare); }
  void give_back(const std::vector<std::int32_t>& spares) PI2_REQUIRES(kLock) {
    free_spares_.insert(free_spares_.end(), spares.begin(), spares.end());
  }
  // As give_back; if a read is in flight, once it has ended.
  void drop(std::int32_t spare) PI2_REQUIRES(kLock) {
    if (about(spare).loading)
      about(spare).dropped = true;
    else
      give_back(spare);
  }
  // Called when a read into a spare ends. If the spare was dropped meanwhile, returns true and frees it.
  bool end_dropped(std::int32_t spare) PI2_REQUIRES(kLock) {
    if (!about(spare).dropped) return false;
    about(spare).dropped = false;
    give_back(spare);
    return true;
  }

 private:
  struct About {
    bool loading : 1, guess : 1;
    bool dropped : 1;     // a spare with a read in flight that nobody needs any more
    std::int16_t waiter;  // the chunk that waits for it, or -1
  };
  About& about(std::int64_t place) PI2_REQUIRES(kLock) { return about_[static_cast<std::size_t>(place)]; }
  const About& about(std::int64_t place) const PI2_REQUIRES(kLock) { return about_[static_cast<std::size_t>(place)]; }

  Arena memory_;
  std::int64_t bytes_ = 0, n_spares_ = 0;
  std::int64_t most_slots_ = 0;  // of the cache at its largest size
  std::unique_ptr<NeuronCache> cache_ PI2_PT_GUARDED_BY(kLock);
  std::vector<About> about_ PI2_GUARDED_BY(kLock);
  std::vector<std::int32_t> free_spares_ PI2_GUARDED_BY(kLock);
};

}  // namespace pi2
