// Records into the rings of pi2::trace_start. Off, it costs one relaxed load; on, two reads of the clock and a lock
// that only trace_stop contends for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "pi2/trace.h"

namespace pi2 {

// Start of the running trace, which also identifies it; 0: none.
extern std::atomic<std::int64_t> trace_began;

inline std::int64_t trace_clock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Records an event for the trace that began at `began`, if it still runs. Never throws.
void trace_record(std::int64_t began, const TraceEvent& event);

// Called once by each thread of a read engine, before it records anything.
void trace_io_thread();

// A span of this thread, as long as the object lives; nested objects are nested spans.
class TraceSpan {
 public:
  explicit TraceSpan(Stage stage, std::int64_t arg0 = -1, std::int64_t arg1 = -1)
      : began_(trace_began.load(std::memory_order_relaxed)) {
    if (began_ == 0) return;
    event_ = {TraceKind::kSpan, static_cast<std::int32_t>(stage), trace_clock(), 0, {arg0, arg1}};
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;
  ~TraceSpan() {
    if (began_ == 0) return;
    event_.duration_ns = trace_clock() - event_.begin_ns;
    trace_record(began_, event_);
  }

 private:
  std::int64_t began_;
  TraceEvent event_;  // only set while recording
};

// Sets the value of a counter.
inline void trace_counter(TraceCounter counter, std::int64_t value) {
  const std::int64_t began = trace_began.load(std::memory_order_relaxed);
  if (began == 0) return;
  trace_record(began, {TraceKind::kCounter, static_cast<std::int32_t>(counter), trace_clock(), 0, {value, -1}});
}

// The time now, for a later trace_async; 0 if no trace runs.
inline std::int64_t trace_time() { return trace_began.load(std::memory_order_relaxed) == 0 ? 0 : trace_clock(); }

// Something that began at `begin_ns`, perhaps on another thread, and has ended now. A single event, so that no half of
// it can be lost.
inline void trace_async(Stage stage, std::int64_t begin_ns, std::int64_t arg0 = -1, std::int64_t arg1 = -1) {
  const std::int64_t began = trace_began.load(std::memory_order_relaxed);
  if (began == 0 || begin_ns < began) return;  // it began before the trace did
  const std::int64_t duration = trace_clock() - begin_ns;
  trace_record(began, {TraceKind::kAsync, static_cast<std::int32_t>(stage), begin_ns, duration, {arg0, arg1}});
}

}  // namespace pi2
