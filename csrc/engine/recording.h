// Records which neurons calls need, on request (pi2/replay.h), and whether a replay can reproduce the recorded hits.
#pragma once

#include <memory>
#include <utility>

#include "cache/access_log.h"
#include "engine/lock.h"

namespace pi2 {

class Recording {
 public:
  bool on() const PI2_REQUIRES(kLock) { return log_ != nullptr; }
  AccessLog& log() PI2_REQUIRES(kLock) { return *log_; }

  // `settled`: the hot set is in the cache.
  void begin(std::unique_ptr<AccessLog> log, bool settled) PI2_REQUIRES(kLock) {
    log_ = std::move(log);
    untold_ = untold_ || !settled;
  }

  Accesses take() PI2_REQUIRES(kLock) {
    if (log_ == nullptr) return Accesses();
    Accesses all = log_->take();
    all.whole = !untold_ && all.lost == 0;
    untold_ = untold_ || !all.layers.empty() || all.lost > 0;  // the next recording lacks these calls
    log_.reset();
    return all;
  }

  // The cache changed in a way that the log does not show.
  void lose() PI2_REQUIRES(kLock) { untold_ = true; }
  bool lost() const PI2_REQUIRES(kLock) { return untold_; }

 private:
  std::unique_ptr<AccessLog> log_ PI2_GUARDED_BY(kLock);  // null: not recording
  bool untold_ PI2_GUARDED_BY(kLock) = false;
};

}  // namespace pi2
