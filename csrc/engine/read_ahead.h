// Of streams (prompts): the layer that is likely to be streamed next, of which slots are read into spares that nobody
// has a use for any more.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/chunks.h"
#include "engine/common.h"
#include "engine/reads.h"
#include "engine/residents.h"

namespace pi2 {

class ReadAhead {
 public:
  ReadAhead(Common& common, Reads& reads, const Residents& residents)
      : common_(common), reads_(reads), residents_(residents) {}

  void set_up() PI2_REQUIRES(kLock);  // when the layout is there

  // A call begins: what was read ahead for another than this one is in the way.
  void follow(std::int64_t layer, bool stream, const Chunks& chunks) PI2_REQUIRES(kLock);
  bool whole() const PI2_REQUIRES(kLock) { return whole_; }  // the stream wants most of its layer

  // The spare that this slot was read into, or -1; and it is somebody's now.
  std::int32_t find(std::int64_t layer, std::int64_t in_file) const PI2_REQUIRES(kLock) {
    return layer_ == layer ? by_slot_[static_cast<std::size_t>(in_file)] : -1;
  }
  void taken(std::int64_t in_file) PI2_REQUIRES(kLock) { by_slot_[static_cast<std::size_t>(in_file)] = -1; }
  // Its read has failed.
  void lose(std::int64_t layer, const Wanted& wanted) PI2_REQUIRES(kLock);
  // Its spares are needed. False if there are none.
  bool drop() PI2_REQUIRES(kLock);

  // Reads of the next slots of the layer after this one; null if there is no room or nothing is left.
  std::unique_ptr<ReadBatch> take(std::int64_t layer) PI2_REQUIRES(kLock);

 private:
  Common& common_;
  Reads& reads_;
  const Residents& residents_;
  std::int64_t layer_ PI2_GUARDED_BY(kLock) = -1;  // that is read ahead, or -1
  std::int64_t next_ PI2_GUARDED_BY(kLock) = 0;    // the slot of it that is read next
  std::vector<std::int32_t> by_slot_ PI2_GUARDED_BY(kLock);
  std::int64_t last_ PI2_GUARDED_BY(kLock) = -1;  // layer that was streamed
  // By layer: the one that was streamed after it, or is likely to be.
  std::vector<std::int64_t> follower_ PI2_GUARDED_BY(kLock);
  bool whole_ PI2_GUARDED_BY(kLock) = false;
};

}  // namespace pi2
