// Resizes the cache and loads the hot set into it: between calls, or on a background thread while calls run.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/common.h"
#include "engine/demand_reads.h"
#include "engine/hot_set.h"
#include "engine/reads.h"

namespace pi2 {

class CacheRebalancer {
 public:
  CacheRebalancer(Common& common, Turns& turns, Reads& reads, HotSet& hot_set, const DemandReads& demand)
      : common_(common), turns_(turns), reads_(reads), hot_set_(hot_set), demand_(demand) {}

  // Ends the thread. Call this before anything that the thread uses is destroyed.
  void stop() PI2_EXCLUDES(kLock);

  // See Offload.
  std::string resize(std::int64_t cache_bytes, double hot_share) PI2_EXCLUDES(kLock);
  std::string arrange(const std::vector<std::int64_t>& neurons, std::int64_t cache_bytes) PI2_EXCLUDES(kLock);
  void leave_out(const std::vector<std::int64_t>& first) PI2_EXCLUDES(kLock);
  std::string preload() PI2_EXCLUDES(kLock);

  // Something has changed that may have blocked the thread.
  void wake() noexcept PI2_REQUIRES(kLock);
  // Reads of this many slots have ended.
  void over(std::int64_t slots) PI2_REQUIRES(kLock) { reading_ -= slots; }
  // Slots that are still to be loaded or released; 0: done.
  std::int64_t left() const PI2_REQUIRES(kLock);

 private:
  std::string wrong_numbers(const std::vector<std::int64_t>& neurons) const;
  bool start() PI2_REQUIRES(kLock);
  void run() PI2_EXCLUDES(kLock);
  bool may_go_on() const PI2_REQUIRES(kLock);
  std::unique_ptr<ReadBatch> some() PI2_REQUIRES(kLock);
  std::unique_ptr<ReadBatch> bring(const RebalancePlan::Piece& piece) PI2_REQUIRES(kLock);
  std::int64_t bring_until(const RebalancePlan::Piece& piece, std::unique_ptr<ReadBatch>* batch) PI2_REQUIRES(kLock);

  Common& common_;
  Turns& turns_;
  Reads& reads_;
  HotSet& hot_set_;
  const DemandReads& demand_;
  std::int64_t reading_ PI2_GUARDED_BY(kLock) = 0;  // slots
  bool blocked_ PI2_GUARDED_BY(kLock) = false;      // every cache slot is pinned
  int paused_ PI2_GUARDED_BY(kLock) = 0;            // > 0: a resize waits until nothing is being read
  bool ending_ PI2_GUARDED_BY(kLock) = false;
  std::condition_variable work_;
  std::thread thread_;  // started while the lock is held
};

}  // namespace pi2
