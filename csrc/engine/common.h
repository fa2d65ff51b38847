// Shared by all parts of an open store.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>

#include "engine/layout.h"
#include "engine/lock.h"
#include "engine/places.h"
#include "engine/recording.h"
#include "pi2/offload.h"

namespace pi2 {

constexpr char kForked[] = "the store was opened in another process (fork): open it again in this one";

using Clock = std::chrono::steady_clock;

inline std::int64_t since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

// A sleeping worker is often woken on a core where another one spins in OpenMP's barrier. On two cores a 7B model
// decodes 1.4 times as fast if workers yield, instead of sleeping, for as long as a layer's reads usually take.
constexpr std::chrono::milliseconds kSpin{4};

struct Common {
  const pid_t process = getpid();
  OffloadOptions options;  // as passed to open()
  Layout layout;
  StoreMutex mutex;
  Places places;
  Recording recording;
  OffloadStats sums PI2_GUARDED_BY(kLock);

  // A forked child has none of the threads, but the locks that they held stay locked.
  bool forked() const { return getpid() != process; }

  // For StoreMutex::wait_for_news().
  Clock::time_point spin_until(Clock::time_point start) const { return options.spin ? start + kSpin : start; }
};

}  // namespace pi2
