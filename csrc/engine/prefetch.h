// Guesses: what a layer is likely to want is read into the cache before anybody asks for it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/call.h"
#include "engine/common.h"
#include "engine/reads.h"
#include "engine/residents.h"

namespace pi2 {

class Prefetch {
 public:
  Prefetch(Common& common, Reads& reads, const Residents& residents, const Call& call)
      : common_(common), reads_(reads), residents_(residents), call_(call) {}

  // See Offload::prefetch.
  void operator()(std::int64_t layer, std::int64_t n_hot, const std::uint8_t* active, std::int64_t tokens,
                  CallStats* stats) PI2_EXCLUDES(kLock);
  // See Offload::mostly_missing.
  bool mostly_missing(std::int64_t layer, std::int64_t n_hot, const std::uint8_t* active, std::int64_t tokens) const
      PI2_EXCLUDES(kLock);

 private:
  // Takes from `slots`, ascending, those before the first that is wanted here: they are somebody else's.
  void leave_to_others(std::int64_t layer, std::vector<std::int64_t>* slots) const PI2_REQUIRES(kLock);
  void take(std::vector<std::int64_t> slots, ReadBatch* batch) PI2_REQUIRES(kLock);

  Common& common_;
  Reads& reads_;
  const Residents& residents_;
  const Call& call_;
};

}  // namespace pi2
