// Reads of an open store: which are under way, and what is told of those that are over.
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

// What becomes of reads. With the lock.
class ReadSink {
 public:
  virtual ~ReadSink() = default;
  // One is over: its places are there, or empty if something is wrong. True if somebody may be waiting for that.
  virtual bool over(const ReadRun& run, const Wrong& wrong) noexcept PI2_REQUIRES(kLock) = 0;
  // Some are.
  virtual void some_over() noexcept PI2_REQUIRES(kLock) = 0;
};

class Reads {
 public:
  Reads(Common& common, ReadSink& sink) : common_(common), sink_(sink) {}

  // "" or what is wrong. `device` is used if the options have one.
  std::string open(DeviceModel device);
  // Waits for what is under way: before anything else goes that reads use.
  void close() { engine_.reset(); }

  const char* name() const { return engine_->name(); }
  std::atomic<std::int64_t>& late() { return late_; }  // see OffloadStats

  // Reads that are not over; those of them that the call under way waits for.
  std::int64_t under_way() const PI2_REQUIRES(kLock) { return under_way_; }
  std::int64_t asked_for() const PI2_REQUIRES(kLock) { return asked_for_; }
  // Reads outlive calls: those under way count up to now.
  void add_up_time() PI2_REQUIRES(kLock);

  // Makes the reads of a batch that has what it wants, and counts them as begun.
  void plan(ReadBatch* batch) PI2_REQUIRES(kLock);
  // Begins them. The lock is given back meanwhile. False if there is no memory: then nothing of it is read, and its
  // places are empty again. `stats`: of the call that asked for it, if one did.
  bool submit(std::unique_ptr<ReadBatch> batch, CallStats* stats) noexcept PI2_REQUIRES(kLock);

 private:
  void arrived(const ReadResult* results, std::int64_t count) noexcept PI2_EXCLUDES(kLock);
  Wrong check(const ReadRun& run, const ReadResult& result) const noexcept PI2_EXCLUDES(kLock);
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
