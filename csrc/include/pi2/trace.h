// Traces: spans of stages, reads and counters, recorded into one ring buffer per thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace pi2 {

// Stages that take time. In the order of torch_pi2.observe.trace.STAGES; docs/TRACES.md says what each means.
enum class Stage : std::int32_t {
  kFfn,  // whole calls, on the calling thread
  kPredict,
  kLinear,
  kAttention,
  kPredictRows,  // shares of such calls, on every thread that works on them
  kLinearRows,
  kCompute,
  kReduce,
  kBegin,  // further steps of a layer over a store
  kSubmit,
  kWait,
  kJoin,
  kVerify,  // on I/O threads
  kPread,
  kRead,  // asynchronous: from submission to the end
};

// Counters. In the order of torch_pi2.observe.trace.COUNTERS.
enum class TraceCounter : std::int32_t { kReading, kBytesRead, kHotNeurons, kColdNeurons };

enum class TraceKind : std::int32_t { kSpan, kAsync, kCounter };

struct TraceEvent {
  TraceKind kind;
  std::int32_t stage;  // a Stage; for a counter, a TraceCounter
  std::int64_t begin_ns, duration_ns;
  std::int64_t args[2];  // -1: none; a counter's first is its value
};

// The events of one thread.
struct TraceLane {
  std::int64_t number = 0;     // in the order of the threads' first events
  bool io = false;             // a thread of a read engine
  std::int64_t system_id = 0;  // of the thread (Linux), else 0
  std::int64_t capacity = 0;
  std::int64_t written = 0;  // events; the last `capacity` of them are kept
  std::unique_ptr<TraceEvent[]> events;

  std::int64_t kept() const { return written < capacity ? written : capacity; }
  std::int64_t lost() const { return written - kept(); }
};

struct Trace {
  std::vector<TraceLane> lanes;
  std::int64_t lost = 0;  // events of threads without a lane: too many threads, or no memory

  std::int64_t kept() const;
};

constexpr std::int64_t kMostTraced = 1 << 24;  // events per thread
constexpr std::int64_t kMostLanes = 1024;      // threads

// Starts to record at most `capacity` events per thread, 1 to kMostTraced; the oldest are overwritten. Memory is taken
// as events come. Returns false, and changes nothing, while a trace is running.
bool trace_start(std::int64_t capacity);

// Ends the trace and returns it, lane by lane, in no particular order of time; empty if none is running. Spans that
// have not ended are missing. Thread-safe; other threads may be recording.
Trace trace_stop();

}  // namespace pi2
