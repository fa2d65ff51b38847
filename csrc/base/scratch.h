// Scratch memory of a thread, kept between calls: a new 400 KB buffer per layer would cost page faults each time.
#pragma once

#include <cstdint>
#include <memory>

namespace pi2 {

enum class Scratch {
  kInput,
  kPartials,
  kIds,
  kMask,
  kExpertInputs,
  kExpertResults,
  kExpertIds,
  kExpertWorks,
  kGathered,
  kScores,
  kGates,
  kBlocks,
  kCount
};

// A 64-byte aligned buffer of at least `count` floats; contents are undefined. Valid until the same thread asks for
// the same slot again.
float* scratch(Scratch slot, std::int64_t count);

}  // namespace pi2
