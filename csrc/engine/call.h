// The call under way: which neurons its chunks want, which of them are there, and reads of the others. All of it with
// the lock, but what neurons() has is read where it was said to be there.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "engine/chunks.h"
#include "engine/common.h"
#include "engine/read_ahead.h"
#include "engine/reads.h"
#include "engine/residents.h"

namespace pi2 {

class Call {
 public:
  Call(Common& common, Reads& reads, ReadAhead& ahead, const Residents& residents)
      : common_(common), reads_(reads), ahead_(ahead), residents_(residents) {}

  void set_up() PI2_REQUIRES(kLock);  // when the layout is there

  std::int64_t layer() const { return layer_; }
  void start(std::int64_t layer) PI2_REQUIRES(kLock);
  // No read of it is under way any more, and nothing remembers its chunks.
  void end() PI2_REQUIRES(kLock);
  void abandon() PI2_REQUIRES(kLock);  // the end, too; something was thrown
  void fail(const Wrong& why) noexcept PI2_REQUIRES(kLock);
  bool broken() const { return broken_.load(std::memory_order_acquire); }
  const Wrong& problem() const PI2_REQUIRES(kLock) { return problem_; }
  // What the last call did.
  void add_to(CallStats* stats) const PI2_REQUIRES(kLock);

  // See NeuronSource.
  void leave_out_missing(std::uint8_t* active, std::int64_t tokens, std::int64_t n_hot) PI2_REQUIRES(kLock);
  void expect(std::int64_t n_chunks, bool stream, bool last) PI2_REQUIRES(kLock);
  void begin(const std::int64_t* ids, const std::int64_t* counts, std::int64_t chunk_size, const std::uint8_t* keep)
      PI2_REQUIRES(kLock);
  std::int64_t next() PI2_REQUIRES(kLock);
  void done(std::int64_t chunk) PI2_REQUIRES(kLock);
  const char* const* neuron_rows() const { return where_[static_cast<std::size_t>(layer_)].data(); }

  // A slot that a chunk waits for is there, or something is wrong with it. True if the chunk is there now.
  bool arrived(std::int64_t chunk, const Wanted& slot, bool asked_for, const Wrong& wrong) noexcept PI2_REQUIRES(kLock);
  // Begins reads for waiting chunks while there are places. The lock is given back meanwhile.
  void ask() PI2_REQUIRES(kLock);
  // As ask(), if begin() is not going to: for guesses that failed.
  void ask_again() noexcept PI2_REQUIRES(kLock);

  bool under_way() const PI2_REQUIRES(kLock) { return calling_; }
  // It misses slots of which no read was begun.
  bool wants_places() const PI2_REQUIRES(kLock) { return !chunks_.waiting.empty(); }
  bool wants_places_of(std::int64_t layer) const PI2_REQUIRES(kLock) { return layer == layer_ && wants_places(); }

 private:
  bool rests() PI2_REQUIRES(kLock);
  void look_up(std::int64_t c) PI2_REQUIRES(kLock);
  std::int64_t take_ahead(std::int64_t in_file, Chunk* chunk) PI2_REQUIRES(kLock);
  bool keeps(std::int64_t in_file) const PI2_REQUIRES(kLock);
  void note_uses(std::int64_t hits) PI2_REQUIRES(kLock);
  std::unique_ptr<ReadBatch> take(std::int64_t c) PI2_REQUIRES(kLock);
  std::int32_t place_for(std::int64_t in_file, Chunk* chunk) PI2_REQUIRES(kLock);
  void point_to(const Chunk& chunk, const std::vector<Wanted>& wanted) PI2_REQUIRES(kLock);
  void read_ahead() PI2_REQUIRES(kLock);
  bool over() const PI2_REQUIRES(kLock) { return broken() || chunks_.given == chunks_.total; }
  bool may_give() const PI2_REQUIRES(kLock);
  void wait() PI2_REQUIRES(kLock);
  void count(std::int64_t CallStats::* what, std::int64_t n) PI2_REQUIRES(kLock);

  const StoreLayer& about() const { return common_.layout.about(layer_); }
  std::int64_t key() const { return common_.layout.key_of(layer_); }

  Common& common_;
  Reads& reads_;
  ReadAhead& ahead_;
  const Residents& residents_;
  std::vector<std::vector<const char*>> where_;  // [layers][neurons], of the last call
  struct Rest {
    std::int64_t changes = -1;  // of the cache, when it was looked at
    bool whole = false;
  };
  std::vector<Rest> rest_ PI2_GUARDED_BY(kLock);                            // by layer
  std::vector<std::deque<std::int64_t>> last_calls_ PI2_GUARDED_BY(kLock);  // by layer: when, if there is a window
  std::int64_t layer_ = 0;                                                  // changes between calls
  Chunks chunks_ PI2_GUARDED_BY(kLock);
  bool calling_ PI2_GUARDED_BY(kLock) = false, begun_ PI2_GUARDED_BY(kLock) = false;
  bool stream_ PI2_GUARDED_BY(kLock) = false, last_piece_ PI2_GUARDED_BY(kLock) = true;
  const std::uint8_t* keep_anyway_ PI2_GUARDED_BY(kLock) = nullptr;  // [neurons] or null: of streams, for the cache
  std::atomic<bool> broken_{false};
  Wrong problem_ PI2_GUARDED_BY(kLock);
  CallStats stats_ PI2_GUARDED_BY(kLock);
};

}  // namespace pi2
