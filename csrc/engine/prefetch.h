// Prefetch: reads neurons that a later layer is likely to need into the cache.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/common.h"
#include "engine/demand_reads.h"
#include "engine/hot_set.h"
#include "engine/reads.h"

namespace pi2 {

class Prefetch {
 public:
  Prefetch(Common& common, Reads& reads, const HotSet& hot_set, const DemandReads& demand)
      : common_(common), reads_(reads), hot_set_(hot_set), demand_(demand) {}

  // See Offload::prefetch.
  void operator()(std::int64_t layer, std::int64_t n_hot, const std::uint8_t* active, std::int64_t tokens,
                  CallStats* stats) PI2_EXCLUDES(kLock);
  // See Offload::mostly_missing.
  bool mostly_missing(std::int64_t layer, std::int64_t n_hot, const std::uint8_t* active, std::int64_t tokens) const
      PI2_EXCLUDES(kLock);

 private:
  // Removes from `slots` (ascending) those before the first wanted one: they are computed elsewhere.
  void leave_to_others(std::int64_t layer, std::vector<std::int64_t>* slots) const PI2_REQUIRES(kLock);
  void take(std::vector<std::int64_t> slots, ReadBatch* batch) PI2_REQUIRES(kLock);

  Common& common_;
  Reads& reads_;
  const HotSet& hot_set_;
  const DemandReads& demand_;
};

}  // namespace pi2
