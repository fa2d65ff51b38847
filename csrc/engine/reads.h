// The reads of an open store: submits them, counts those in flight, and hands over those that have ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/common.h"
#include "engine/read_batch.h"
#include "io/device_model.h"
#include "pi2/read_engine.h"

namespace pi2 {

// Receives reads that have ended, with the lock held.
class ReadSink {
 public:
  virtual ~ReadSink() = default;
  // A read has ended: its places are filled, or empty after an error. True if a worker may be waiting for it.
  virtual bool over(const ReadRun& run, const ReadError& wrong) noexcept PI2_REQUIRES(kLock) = 0;
  // Called once after each group of over().
  virtual void some_over() noexcept PI2_REQUIRES(kLock) = 0;
};

class Reads {
 public:
  Reads(Common& common, ReadSink& sink) : common_(common), sink_(sink) {}

  // Returns "" or an error message. `device` is used if the options simulate one.
  std::string open(DeviceModel device);
  // Waits for reads in flight. Call this before anything that reads use is destroyed.
  void close() { engine_.reset(); }

  const char* name() const { return engine_->name(); }
  std::atomic<std::int64_t>& late() { return late_; }  // see OffloadStats

  // Reads in flight; those of them that the current call waits for.
  std::int64_t under_way() const PI2_REQUIRES(kLock) { return under_way_; }
  std::int64_t asked_for() const PI2_REQUIRES(kLock) { return asked_for_; }
  // Adds the time of reads in flight up to now: reads outlive calls.
  void add_up_time() PI2_REQUIRES(kLock);

  // Plans the reads of a batch whose `wanted` is complete, and counts them as in flight.
  void plan(ReadBatch* batch) PI2_REQUIRES(kLock);
  // Submits the batch; releases the lock meanwhile. Returns false without memory: nothing is read then and its places
  // are empty again. `stats`: of the call that needs the batch, or null.
  bool submit(std::unique_ptr<ReadBatch> batch, CallStats* stats) noexcept PI2_REQUIRES(kLock);

 private:
  void arrived(const ReadResult* results, std::int64_t count) noexcept PI2_EXCLUDES(kLock);
  ReadError check(const ReadRun& run, const ReadResult& result) const noexcept PI2_EXCLUDES(kLock);
  void count(std::int64_t reads, std::int64_t bytes, CallStats* stats) PI2_REQUIRES(kLock);
  void ended(const ReadBatch& batch) PI2_REQUIRES(kLock);

  Common& common_;
  ReadSink& sink_;
  std::unique_ptr<ReadEngine> engine_;
  std::atomic<std::int64_t> late_{0};
  std::int64_t under_way_ PI2_GUARDED_BY(kLock) = 0, asked_for_ PI2_GUARDED_BY(kLock) = 0;
  Clock::time_point io_since_ PI2_GUARDED_BY(kLock);
};

}  // namespace pi2
