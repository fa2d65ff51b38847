// The hot set: neurons that stay in the cache whatever calls need. Also the cache's first contents and its size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache/rebalance_plan.h"
#include "engine/common.h"

namespace pi2 {

class HotSet {
 public:
  static constexpr std::int64_t kMostAtOnce = 512;  // slots handled before waiting calls get the lock

  explicit HotSet(Common& common) : common_(common) {}

  void set_up() PI2_REQUIRES(kLock);  // after the layout is open

  // Whether a slot of the file belongs to the hot set.
  bool holds(std::int64_t layer, std::int64_t slot) const PI2_REQUIRES(kLock) {
    return rebalance_plan_.holds(layer, slot);
  }
  // The first slot of a layer that is computed here.
  std::int64_t first_wanted(std::int64_t layer) const PI2_REQUIRES(kLock) {
    return left_out_.empty() ? 0 : left_out_[static_cast<std::size_t>(layer)];
  }

  // The steps from the slots that are fixed now to the hot set.
  RebalancePlan& rebalance_plan() PI2_REQUIRES(kLock) { return rebalance_plan_; }
  const RebalancePlan& rebalance_plan() const PI2_REQUIRES(kLock) { return rebalance_plan_; }
  bool settled() const PI2_REQUIRES(kLock) { return settled_; }  // all steps are done
  // Called when all steps are done. If no call has used the cache yet, its contents are put in a replay's order.
  void settle() noexcept PI2_REQUIRES(kLock);
  // Unfixes the slots of a piece.
  void release(const RebalancePlan::Piece& piece) PI2_REQUIRES(kLock);

  // Makes the first resident[l] neurons of each layer the hot set of a cache of `slots` slots (the present number while
  // reads are in flight). If it throws, nothing has changed.
  void arrange(std::vector<std::int64_t> resident, std::int64_t slots) PI2_REQUIRES(kLock);
  // Slots before these are computed elsewhere.
  void leave_out(std::vector<std::int64_t> first) PI2_REQUIRES(kLock);

  // Slots of a cache of this many bytes; "" or why this size is refused.
  std::int64_t slots_for(std::int64_t cache_bytes) const;
  std::string refused_size(std::int64_t cache_bytes) const;
  // Nothing may be in flight.
  void resize(std::int64_t slots, double hot_share) PI2_REQUIRES(kLock);

  // Fills the cache with the first neurons of every layer, the hot set first.
  std::string preload() PI2_REQUIRES(kLock);

 private:
  void change_size(std::int64_t slots) PI2_REQUIRES(kLock);
  void rearrange(std::int64_t slots) PI2_REQUIRES(kLock);
  void begin_with(std::vector<std::int64_t> keys) PI2_REQUIRES(kLock);
  ReadError load(std::vector<std::int64_t> keys) PI2_REQUIRES(kLock);

  Common& common_;
  std::vector<std::int64_t> resident_ PI2_GUARDED_BY(kLock);  // neurons, by layer; empty: hot_share decides
  std::vector<std::int64_t> left_out_
      PI2_GUARDED_BY(kLock);  // by layer: number of first slots computed elsewhere; empty: 0
  RebalancePlan rebalance_plan_ PI2_GUARDED_BY(kLock);
  double hot_share_ PI2_GUARDED_BY(kLock) = 0;
  bool settled_ PI2_GUARDED_BY(kLock) = true, preloaded_ PI2_GUARDED_BY(kLock) = false;
};

}  // namespace pi2
