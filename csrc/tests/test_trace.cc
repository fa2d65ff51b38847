// What is recorded, what is not, and what happens when threads end, rings run over and traces stop in the middle.
#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "base/trace.h"
#include "pi2/ffn.h"
#include "pi2/offload.h"
#include "pi2/thread_pool.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

namespace {

using namespace pi2;
using namespace pi2_test;

std::vector<TraceEvent> all_of(const Trace& trace) {
  std::vector<TraceEvent> events;
  for (const TraceLane& lane : trace.lanes)
    for (std::int64_t i = 0; i < lane.kept(); ++i) events.push_back(lane.events[static_cast<std::size_t>(i)]);
  return events;
}

bool is(const TraceEvent& event, TraceKind kind, Stage stage) {
  return event.kind == kind && event.stage == static_cast<std::int32_t>(stage);
}

long check_off() {
  {
    const TraceSpan span(Stage::kCompute, 1, 2);
  }
  trace_counter(TraceCounter::kReading, 3);
  PI2_CHECK(trace_time() == 0, "a time, though nothing is recorded");
  trace_async(Stage::kRead, 1, 2);
  PI2_CHECK(trace_stop().lanes.empty(), "none was under way");
  const std::int64_t before = trace_clock();
  PI2_CHECK(trace_start(10), "the first");
  PI2_CHECK(!trace_start(10), "a second at the same time");
  trace_async(Stage::kRead, before - 1, 2);  // began before the trace
  const Trace trace = trace_stop();
  PI2_CHECK(trace.kept() == 0 && trace.lost == 0, "%ld events", static_cast<long>(trace.kept()));
  return 5;
}

long check_events() {
  TraceSpan early(Stage::kWait);  // ends in the trace, but began before it
  trace_start(10);
  std::int64_t asked = trace_time();
  PI2_CHECK(asked > 0, "no time");
  {
    const TraceSpan outer(Stage::kFfn, 4);
    const TraceSpan inner(Stage::kCompute, 4, 7);
  }
  trace_counter(TraceCounter::kBytesRead, 512);
  std::thread io([&] {
    trace_io_thread();
    trace_async(Stage::kRead, asked, 4, 7);
  });
  io.join();  // ended, and what it recorded is there
  const Trace trace = trace_stop();
  PI2_CHECK(trace.lanes.size() == 2 && trace.lanes[0].number == 0 && trace.lanes[1].number == 1, "%zu lanes",
            trace.lanes.size());
  PI2_CHECK(!trace.lanes[0].io && trace.lanes[1].io, "which is of I/O");
#if defined(__linux__)
  PI2_CHECK(trace.lanes[0].system_id > 0 && trace.lanes[0].system_id != trace.lanes[1].system_id, "system's numbers");
#endif
  const std::vector<TraceEvent> events = all_of(trace);
  PI2_CHECK(events.size() == 4, "%zu events", events.size());
  if (events.size() != 4) return 1;
  const TraceEvent &inner = events[0], &outer = events[1];
  PI2_CHECK(is(inner, TraceKind::kSpan, Stage::kCompute) && inner.args[0] == 4 && inner.args[1] == 7, "the inner one");
  PI2_CHECK(is(outer, TraceKind::kSpan, Stage::kFfn) && outer.args[0] == 4 && outer.args[1] == -1, "the outer one");
  PI2_CHECK(outer.begin_ns <= inner.begin_ns && inner.duration_ns >= 0 &&
                inner.begin_ns + inner.duration_ns <= outer.begin_ns + outer.duration_ns,
            "nested");
  PI2_CHECK(events[2].kind == TraceKind::kCounter && events[2].args[0] == 512 && events[2].duration_ns == 0 &&
                events[2].stage == static_cast<std::int32_t>(TraceCounter::kBytesRead),
            "the counter");
  PI2_CHECK(is(events[3], TraceKind::kAsync, Stage::kRead) && events[3].begin_ns == asked, "the read");

  // A span that outlives its trace belongs to no other.
  trace_start(10);
  auto late = std::make_unique<TraceSpan>(Stage::kWait);
  trace_stop();
  trace_start(10);
  late.reset();
  PI2_CHECK(trace_stop().kept() == 0, "a span of another trace");
  return 12;
}

long check_overflow() {
  trace_start(3);
  for (int i = 0; i < 10; ++i) const TraceSpan span(Stage::kCompute, i);
  const Trace trace = trace_stop();
  PI2_CHECK(trace.kept() == 3 && trace.lanes[0].lost() == 7, "%ld kept", static_cast<long>(trace.kept()));
  std::set<std::int64_t> kept;
  for (const TraceEvent& event : all_of(trace)) kept.insert(event.args[0]);
  PI2_CHECK(kept == std::set<std::int64_t>({7, 8, 9}), "the newest stay");
  trace_start(1);
  for (std::int64_t i = 0; i < kMostLanes + 5; ++i) std::thread([] { const TraceSpan span(Stage::kCompute); }).join();
  const Trace many = trace_stop();
  PI2_CHECK(many.kept() == kMostLanes && many.lost == 5, "%ld threads' events, %ld lost",
            static_cast<long>(many.kept()), static_cast<long>(many.lost));
  return 3;
}

// Threads that come, record and go while traces start and stop: for the sanitizers, and no event is of another trace.
long check_threads() {
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&over, t] {
      for (std::int64_t i = 0; !over.load(); ++i) {
        const TraceSpan span(Stage::kCompute, t, i);
        trace_counter(TraceCounter::kReading, i);
        trace_async(Stage::kRead, trace_time(), t, i);
        if (i % 64 == 0) std::thread([i] { const TraceSpan brief(Stage::kVerify, 9, i); }).join();
      }
    });
  }
  long cases = 0;
  std::int64_t events = 0;
  for (int round = 0; round < 40; ++round) {
    const std::int64_t start = trace_clock();
    PI2_CHECK(trace_start(200), "round %d", round);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const Trace trace = trace_stop();
    const std::int64_t end = trace_clock();
    for (const TraceEvent& event : all_of(trace)) {
      PI2_CHECK(event.begin_ns >= start && event.duration_ns >= 0 && event.begin_ns + event.duration_ns <= end,
                "an event out of its trace");
      ++events;
    }
    ++cases;
  }
  over.store(true);
  for (std::thread& thread : threads) thread.join();
  PI2_CHECK(events > 0, "nothing was recorded");
  return cases;
}

// A layer in memory: every chunk once, whoever computes it.
long check_layers() {
  std::mt19937 rng(5);
  constexpr std::int64_t kNeurons = 1000, kHidden = 512, kTokens = 3;
  const std::vector<float> x = floats(rng, kTokens * kHidden), neuron_rows = floats(rng, kNeurons * 3 * kHidden);
  std::vector<float> y(static_cast<std::size_t>(kTokens * kHidden));
  FfnArgs args;
  args.x = x.data();
  args.y = y.data();
  args.tokens = kTokens;
  args.hidden = kHidden;
  args.neurons = kNeurons;
  args.neuron_rows = neuron_rows.data();
  args.layer = 6;
  ThreadPool pool(3);
  trace_start(1000);
  sparse_ffn(args, pool.parallel());
  const Trace trace = trace_stop();
  const std::int64_t chunks = (kNeurons + chunk_neurons(kNeurons) - 1) / chunk_neurons(kNeurons);
  std::multiset<std::int64_t> computed, wanted;
  for (std::int64_t c = 0; c < chunks; ++c) wanted.insert(c);
  long whole = 0, reduced = 0;
  for (const TraceEvent& event : all_of(trace)) {
    PI2_CHECK(event.args[0] == 6, "a layer's number");
    if (is(event, TraceKind::kSpan, Stage::kCompute)) computed.insert(event.args[1]);
    whole += is(event, TraceKind::kSpan, Stage::kFfn);
    reduced += is(event, TraceKind::kSpan, Stage::kReduce);
  }
  PI2_CHECK(computed == wanted && whole == 1 && reduced == 1, "%zu chunks, %ld layers", computed.size(), whole);
  PI2_CHECK(trace.lanes.size() <= 3, "%zu lanes", trace.lanes.size());
  return 3;
}

// A layer over a store, in traces that start and end while it is computed: the same bits, and what is read is in it.
long check_store() {
  std::mt19937 rng(8);
  constexpr std::int64_t kNeurons = 400, kHidden = 96;
  const StoreFixture store(rng, 1, kNeurons, 3, kHidden, DType::kQ4);
  const std::vector<float> x = floats(rng, kHidden);
  std::vector<float> y(static_cast<std::size_t>(kHidden));
  OffloadOptions options;
  options.engine = "pread";
  options.io_threads = 3;
  std::string problem;
  const std::unique_ptr<Offload> offload = Offload::open(store.path, options, &problem);
  PI2_CHECK(offload != nullptr, "%s", problem.c_str());
  if (offload == nullptr) return 1;
  FfnArgs args = offload->shape(0);
  args.x = x.data();
  args.y = y.data();
  args.tokens = 1;
  ThreadPool pool(3);
  const auto compute = [&] {
    const std::string wrong = offload->ffn(0, {}, args, pool.parallel());
    PI2_CHECK(wrong.empty(), "%s", wrong.c_str());
  };
  compute();
  const std::vector<float> wanted = y;
  const OffloadStats before = offload->stats(true);
  trace_start(1 << 16);
  compute();
  const Trace trace = trace_stop();
  PI2_CHECK(y == wanted, "other bits");
  std::int64_t reads = 0, verified = 0, bytes = 0;
  for (const TraceLane& lane : trace.lanes) {
    for (std::int64_t i = 0; i < lane.kept(); ++i) {
      const TraceEvent& event = lane.events[static_cast<std::size_t>(i)];
      reads += is(event, TraceKind::kAsync, Stage::kRead);
      if (is(event, TraceKind::kSpan, Stage::kPread)) bytes += event.args[0];
      if (is(event, TraceKind::kSpan, Stage::kVerify)) ++verified;
      const bool on_io = is(event, TraceKind::kSpan, Stage::kPread) || is(event, TraceKind::kSpan, Stage::kVerify);
      if (event.kind == TraceKind::kSpan) PI2_CHECK(on_io == lane.io, "stage %d", event.stage);
    }
  }
  const OffloadStats stats = offload->stats(false);
  PI2_CHECK(
      reads == stats.reads && verified == reads && bytes == stats.bytes_read && reads > 0 && before.reads == reads,
      "%ld reads, %ld bytes", static_cast<long>(reads), static_cast<long>(bytes));

  std::atomic<bool> over{false};
  std::thread other([&] {
    while (!over.load()) {
      trace_start(100);
      std::this_thread::yield();
      trace_stop();
    }
  });
  for (int i = 0; i < 20; ++i) compute();
  over.store(true);
  other.join();
  PI2_CHECK(y == wanted, "other bits");
  return 4;
}

}  // namespace

int main() {
  long cases = check_off();
  cases += check_events();
  cases += check_overflow();
  cases += check_threads();
  cases += check_layers();
  cases += check_store();
  return finish("test_trace", cases);
}
