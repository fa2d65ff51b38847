// What each thread did: spans of stages, reads and counters, recorded for a while into a ring per thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace pi2 {

// What took time. In the order of torch_pi2.observe.trace.STAGES; docs/TRACES.md says what each means.
enum class Stage : std::int32_t {
  kFfn,  // whole calls, on the thread that called
  kPredict,
  kLinear,
  kAttention,
  kPredictRows,  // shares of such calls, on every thread that has some
  kLinearRows,
  kCompute,
  kReduce,
  kBegin,  // what a layer over a store does besides
  kSubmit,
  kWait,
  kJoin,
  kVerify,  // on I/O threads
  kPread,
  kRead,  // asynchronous: from submission to the end
};

// What has a value. In the order of torch_pi2.observe.trace.COUNTERS.
enum class TraceCounter : std::int32_t { kReading, kBytesRead, kHotNeurons, kColdNeurons };

enum class TraceKind : std::int32_t { kSpan, kAsync, kCounter };

struct TraceEvent {
  TraceKind kind;
  std::int32_t stage;  // a Stage; of a counter a TraceCounter
  std::int64_t begin_ns, duration_ns;
  std::int64_t args[2];  // -1: none; a counter's first is its value
};

// What one thread recorded.
struct TraceLane {
  std::int64_t number = 0;     // in the order of their first events
  bool io = false;             // a thread of a read engine
  std::int64_t system_id = 0;  // of the thread (Linux), else 0
  std::int64_t capacity = 0;
  std::int64_t written = 0;  // of these the last `capacity` at most are there
  std::unique_ptr<TraceEvent[]> events;

  std::int64_t kept() const { return written < capacity ? written : capacity; }
  std::int64_t lost() const { return written - kept(); }
};

struct Trace {
  std::vector<TraceLane> lanes;
  std::int64_t lost = 0;  // events of threads that got no lane: there are too many, or no memory

  std::int64_t kept() const;
};

constexpr std::int64_t kMostTraced = 1 << 24;  // events per thread
constexpr std::int64_t kMostLanes = 1024;      // threads

// Begins to record, at most `capacity` events per thread, 1 to kMostTraced: the oldest are overwritten. Memory is taken
// as events come. False, and nothing changes, while a trace is under way.
bool trace_start(std::int64_t capacity);

// Ends it and gives what was recorded, lane by lane in no particular order of time; empty if none is under way. Spans
// that have not ended are not in it. Any thread; others may be in the middle of recording.
Trace trace_stop();

}  // namespace pi2
