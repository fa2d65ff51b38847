// Read-ahead for prompts (streams): slots of the layer that is likely to come next are read into spares that the
// current layer no longer needs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/chunks.h"
#include "engine/common.h"
#include "engine/hot_set.h"
#include "engine/reads.h"

namespace pi2 {

class ReadAhead {
 public:
  ReadAhead(Common& common, Reads& reads, const HotSet& hot_set) : common_(common), reads_(reads), hot_set_(hot_set) {}

  void set_up() PI2_REQUIRES(kLock);  // after the layout is open

  // A call begins: drops what was read ahead for another layer.
  void follow(std::int64_t layer, bool stream, const Chunks& chunks) PI2_REQUIRES(kLock);
  bool whole() const PI2_REQUIRES(kLock) { return whole_; }  // the stream needs most of its layer

  // The spare that this slot was read into, or -1. taken(): a chunk owns it from now on.
  std::int32_t find(std::int64_t layer, std::int64_t in_file) const PI2_REQUIRES(kLock) {
    return layer_ == layer ? by_slot_[static_cast<std::size_t>(in_file)] : -1;
  }
  void taken(std::int64_t in_file) PI2_REQUIRES(kLock) { by_slot_[static_cast<std::size_t>(in_file)] = -1; }
  // The read of a slot has failed.
  void lose(std::int64_t layer, const Wanted& wanted) PI2_REQUIRES(kLock);
  // Gives up all slots read ahead, because their spares are needed. False if there are none.
  bool drop() PI2_REQUIRES(kLock);

  // Reads of the next slots of the layer after `layer`; null if there is no spare or no slot left.
  std::unique_ptr<ReadBatch> take(std::int64_t layer) PI2_REQUIRES(kLock);

 private:
  Common& common_;
  Reads& reads_;
  const HotSet& hot_set_;
  std::int64_t layer_ PI2_GUARDED_BY(kLock) = -1;  // being read ahead, or -1
  std::int64_t next_ PI2_GUARDED_BY(kLock) = 0;    // its next slot to read
  std::vector<std::int32_t> by_slot_ PI2_GUARDED_BY(kLock);
  std::int64_t last_ PI2_GUARDED_BY(kLock) = -1;  // layer streamed last
  // By layer: the layer that was streamed after it last time; at first the next one.
  std::vector<std::int64_t> follower_ PI2_GUARDED_BY(kLock);
  bool whole_ PI2_GUARDED_BY(kLock) = false;
};

}  // namespace pi2
