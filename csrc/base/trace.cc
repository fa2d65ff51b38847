#include "base/trace.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pi2 {

std::atomic<std::int64_t> trace_began{0};

namespace {

// The ring buffer of one thread for one trace. The thread and, until the trace ends, the registry hold it: either may
// end first.
struct Lane {
  const std::int64_t began;  // start of its trace
  std::mutex mutex;          // for `lane`
  TraceLane lane;            // its events are null once trace_stop has taken them

  explicit Lane(std::int64_t its_trace) : began(its_trace) {}
};

struct Registry {
  std::mutex mutex;
  std::int64_t capacity = 0;
  std::int64_t lost = 0;
  std::vector<std::shared_ptr<Lane>> lanes;  // of the running trace
};

Registry& registry() {
  static auto* const instance = new Registry();  // never destroyed: threads may still run
  return *instance;
}

thread_local bool is_io = false;

std::int64_t system_id() {
#if defined(__linux__)
  return static_cast<std::int64_t>(syscall(SYS_gettid));
#else
  return 0;
#endif
}

// This thread's lane in the trace that began at `began`; null if that has ended, or there is no room.
std::shared_ptr<Lane> enter(std::int64_t began) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  if (trace_began.load(std::memory_order_relaxed) != began) return nullptr;
  try {
    if (static_cast<std::int64_t>(r.lanes.size()) < kMostLanes) {
      auto made = std::make_shared<Lane>(began);
      made->lane.events.reset(new TraceEvent[static_cast<std::size_t>(r.capacity)]);  // touched as it is written to
      made->lane.capacity = r.capacity;
      made->lane.number = static_cast<std::int64_t>(r.lanes.size());
      made->lane.io = is_io;
      made->lane.system_id = system_id();
      r.lanes.push_back(made);
      return made;
    }
  } catch (const std::bad_alloc&) {  // tracing must not fail the traced code
  }
  ++r.lost;
  return nullptr;
}

}  // namespace

void trace_io_thread() { is_io = true; }

void trace_record(std::int64_t began, const TraceEvent& event) {
  thread_local std::shared_ptr<Lane> mine;
  if (mine == nullptr || mine->began != began) mine = enter(began);
  if (mine == nullptr) return;
  const std::lock_guard<std::mutex> lock(mine->mutex);
  TraceLane& lane = mine->lane;
  if (lane.events == nullptr) return;  // trace_stop has taken them meanwhile
  lane.events[static_cast<std::size_t>(lane.written++ % lane.capacity)] = event;
}

bool trace_start(std::int64_t capacity) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  if (trace_began.load(std::memory_order_relaxed) != 0) return false;
  r.capacity = std::clamp<std::int64_t>(capacity, 1, kMostTraced);
  r.lanes.clear();  // left by a trace_stop that ran out of memory
  r.lost = 0;
  trace_began.store(std::max<std::int64_t>(1, trace_clock()), std::memory_order_relaxed);
  return true;
}

Trace trace_stop() {
  Registry& r = registry();
  Trace trace;
  const std::lock_guard<std::mutex> lock(r.mutex);
  trace_began.store(0, std::memory_order_relaxed);
  trace.lanes.reserve(r.lanes.size());
  for (const std::shared_ptr<Lane>& each : r.lanes) {
    const std::lock_guard<std::mutex> lane(each->mutex);
    trace.lanes.push_back(std::move(each->lane));
  }
  r.lanes.clear();
  trace.lost = r.lost;
  return trace;
}

std::int64_t Trace::kept() const {
  std::int64_t sum = 0;
  for (const TraceLane& lane : lanes) sum += lane.kept();
  return sum;
}

}  // namespace pi2
