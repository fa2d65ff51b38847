// The current call of a layer: which neurons its chunks need, which of these are in memory, and the reads of the
// missing ones. Everything here is protected by the lock, except the neurons themselves: workers read them without it
// once next() has returned their chunk.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "engine/chunks.h"
#include "engine/common.h"
#include "engine/hot_set.h"
#include "engine/read_ahead.h"
#include "engine/reads.h"

namespace pi2 {

class DemandReads {
 public:
  DemandReads(Common& common, Reads& reads, ReadAhead& ahead, const HotSet& hot_set)
      : common_(common), reads_(reads), ahead_(ahead), hot_set_(hot_set) {}

  void set_up() PI2_REQUIRES(kLock);  // after the layout is open

  std::int64_t layer() const { return layer_; }
  void start(std::int64_t layer) PI2_REQUIRES(kLock);
  // Waits until no read of the call is in flight, then forgets its chunks.
  void end() PI2_REQUIRES(kLock);
  void abandon() PI2_REQUIRES(kLock);  // end() after an exception
  void fail(const ReadError& why) noexcept PI2_REQUIRES(kLock);
  bool broken() const { return broken_.load(std::memory_order_acquire); }
  const ReadError& problem() const PI2_REQUIRES(kLock) { return problem_; }
  // Adds the figures of the last call.
  void add_to(CallStats* stats) const PI2_REQUIRES(kLock);

  // See NeuronSource.
  void leave_out_missing(std::uint8_t* active, std::int64_t tokens, std::int64_t n_hot) PI2_REQUIRES(kLock);
  void expect(std::int64_t n_chunks, bool stream, bool last) PI2_REQUIRES(kLock);
  void begin(const std::int64_t* ids, const std::int64_t* counts, std::int64_t chunk_size, const std::uint8_t* keep)
      PI2_REQUIRES(kLock);
  std::int64_t next() PI2_REQUIRES(kLock);
  void done(std::int64_t chunk) PI2_REQUIRES(kLock);
  const char* const* neuron_rows() const { return where_[static_cast<std::size_t>(layer_)].data(); }

  // A slot that a chunk waits for has arrived or failed. True if the chunk is complete now.
  bool arrived(std::int64_t chunk, const Wanted& slot, bool asked_for, const ReadError& wrong) noexcept
      PI2_REQUIRES(kLock);
  // Starts reads for waiting chunks as long as there is memory for them. Releases the lock meanwhile.
  void submit_reads() PI2_REQUIRES(kLock);
  // As submit_reads(), after prefetched slots failed; does nothing if begin() is still to call it.
  void retry_reads() noexcept PI2_REQUIRES(kLock);

  bool under_way() const PI2_REQUIRES(kLock) { return calling_; }
  // Some missing slots have no read in flight yet.
  bool wants_places() const PI2_REQUIRES(kLock) { return !chunks_.waiting.empty(); }
  bool wants_places_of(std::int64_t layer) const PI2_REQUIRES(kLock) { return layer == layer_ && wants_places(); }

 private:
  bool is_resident() PI2_REQUIRES(kLock);
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
  const HotSet& hot_set_;
  std::vector<std::vector<const char*>> where_;  // [layers][neurons], as of the last call
  struct Residency {
    std::int64_t changes = -1;  // NeuronCache::changes() at the last check
    bool whole = false;
  };
  std::vector<Residency> residency_ PI2_GUARDED_BY(kLock);                  // by layer
  std::vector<std::deque<std::int64_t>> last_calls_ PI2_GUARDED_BY(kLock);  // by layer: times, with a window
  std::int64_t layer_ = 0;                                                  // changes only between calls
  Chunks chunks_ PI2_GUARDED_BY(kLock);
  bool calling_ PI2_GUARDED_BY(kLock) = false, begun_ PI2_GUARDED_BY(kLock) = false;
  bool stream_ PI2_GUARDED_BY(kLock) = false, last_piece_ PI2_GUARDED_BY(kLock) = true;
  const std::uint8_t* keep_anyway_ PI2_GUARDED_BY(kLock) = nullptr;  // [neurons] or null: see NeuronSource::begin
  std::atomic<bool> broken_{false};
  ReadError problem_ PI2_GUARDED_BY(kLock);
  CallStats stats_ PI2_GUARDED_BY(kLock);
};

}  // namespace pi2
