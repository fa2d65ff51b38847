// What the cache has whatever calls want: what is to stay in it, what it begins with, and how large it is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache/arrangement.h"
#include "engine/common.h"

namespace pi2 {

class Residents {
 public:
  static constexpr std::int64_t kMostAtOnce = 512;  // slots that are arranged before calls may go on

  explicit Residents(Common& common) : common_(common) {}

  void set_up() PI2_REQUIRES(kLock);  // when the layout is there

  // Whether a slot of the file is to stay in the cache.
  bool holds(std::int64_t layer, std::int64_t slot) const PI2_REQUIRES(kLock) {
    return arrangement_.holds(layer, slot);
  }
  // The first slot of a layer that anybody wants.
  std::int64_t first_wanted(std::int64_t layer) const PI2_REQUIRES(kLock) {
    return left_out_.empty() ? 0 : left_out_[static_cast<std::size_t>(layer)];
  }

  // The way from what is fixed now to what is to be.
  Arrangement& arrangement() PI2_REQUIRES(kLock) { return arrangement_; }
  const Arrangement& arrangement() const PI2_REQUIRES(kLock) { return arrangement_; }
  bool settled() const PI2_REQUIRES(kLock) { return settled_; }  // it is done
  // That is so. If nobody has used the cache yet, it becomes what a replay begins with.
  void settle() noexcept PI2_REQUIRES(kLock);
  // The slots of such a piece are no longer fixed.
  void release(const Arrangement::Piece& piece) PI2_REQUIRES(kLock);

  // From now on the first resident[l] neurons of each layer are to stay, in a cache of so many slots (as now, while
  // reads are under way). Throws, and nothing has changed.
  void arrange(std::vector<std::int64_t> resident, std::int64_t slots) PI2_REQUIRES(kLock);
  // Slots before these are nobody's.
  void leave_out(std::vector<std::int64_t> first) PI2_REQUIRES(kLock);

  // Slots of a cache of so many bytes; why it cannot be of so many, or "".
  std::int64_t slots_for(std::int64_t cache_bytes) const;
  std::string refused_size(std::int64_t cache_bytes) const;
  // While nothing is read.
  void resize(std::int64_t slots, double hot_share) PI2_REQUIRES(kLock);

  // Neurons of every layer from the first on, as many as there are places in the cache: first those that are to stay.
  std::string preload() PI2_REQUIRES(kLock);

 private:
  void change_size(std::int64_t slots) PI2_REQUIRES(kLock);
  void rearrange(std::int64_t slots) PI2_REQUIRES(kLock);
  void begin_with(std::vector<std::int64_t> keys) PI2_REQUIRES(kLock);
  Wrong load(std::vector<std::int64_t> keys) PI2_REQUIRES(kLock);

  Common& common_;
  std::vector<std::int64_t> resident_ PI2_GUARDED_BY(kLock);  // neurons, by layer; empty: hot_share says what stays
  std::vector<std::int64_t> left_out_ PI2_GUARDED_BY(kLock);  // by layer: first slots that nobody wants, or empty
  Arrangement arrangement_ PI2_GUARDED_BY(kLock);
  double hot_share_ PI2_GUARDED_BY(kLock) = 0;
  bool settled_ PI2_GUARDED_BY(kLock) = true, preloaded_ PI2_GUARDED_BY(kLock) = false;
};

}  // namespace pi2
