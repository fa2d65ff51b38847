// Brings the cache to another size, and into it what is to stay: between calls, or by a thread of its own beside them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/call.h"
#include "engine/common.h"
#include "engine/reads.h"
#include "engine/residents.h"

namespace pi2 {

class Arranger {
 public:
  Arranger(Common& common, Turns& turns, Reads& reads, Residents& residents, const Call& call)
      : common_(common), turns_(turns), reads_(reads), residents_(residents), call_(call) {}

  // Ends the thread: before anything else goes that it uses.
  void stop() PI2_EXCLUDES(kLock);

  // See Offload.
  std::string resize(std::int64_t cache_bytes, double hot_share) PI2_EXCLUDES(kLock);
  std::string arrange(const std::vector<std::int64_t>& neurons, std::int64_t cache_bytes) PI2_EXCLUDES(kLock);
  void leave_out(const std::vector<std::int64_t>& first) PI2_EXCLUDES(kLock);
  std::string preload() PI2_EXCLUDES(kLock);

  // Something has changed that may have been in the way.
  void wake() noexcept PI2_REQUIRES(kLock);
  // Reads of so many slots are over.
  void over(std::int64_t slots) PI2_REQUIRES(kLock) { reading_ -= slots; }
  // Slots that are not yet as they are to be: 0 when all is.
  std::int64_t left() const PI2_REQUIRES(kLock);

 private:
  std::string wrong_numbers(const std::vector<std::int64_t>& neurons) const;
  bool start() PI2_REQUIRES(kLock);
  void run() PI2_EXCLUDES(kLock);
  bool may_go_on() const PI2_REQUIRES(kLock);
  std::unique_ptr<ReadBatch> some() PI2_REQUIRES(kLock);
  std::unique_ptr<ReadBatch> bring(const Arrangement::Piece& piece) PI2_REQUIRES(kLock);
  std::int64_t bring_until(const Arrangement::Piece& piece, std::unique_ptr<ReadBatch>* batch) PI2_REQUIRES(kLock);

  Common& common_;
  Turns& turns_;
  Reads& reads_;
  Residents& residents_;
  const Call& call_;
  std::int64_t reading_ PI2_GUARDED_BY(kLock) = 0;  // slots
  bool blocked_ PI2_GUARDED_BY(kLock) = false;      // everything in the cache is pinned
  int paused_ PI2_GUARDED_BY(kLock) = 0;            // somebody needs that nothing is read
  bool ending_ PI2_GUARDED_BY(kLock) = false;
  std::condition_variable work_;
  std::thread thread_;  // started with the lock
};

}  // namespace pi2
