// torch.ops.pi2.trace_*: traces; see torch_pi2.observe.trace.
#include "pi2/trace.h"

#include <mutex>

#include "bindings/torch/common.h"

namespace pi2::binding {
namespace {

// [n, 4]: the threads of the last trace.
std::mutex threads_mutex;
std::vector<int64_t>& threads() {
  static auto* const all = new std::vector<int64_t>();
  return *all;
}

// False, and no change, while a trace runs.
bool trace_start(int64_t capacity) {
  STD_TORCH_CHECK(capacity >= 1 && capacity <= kMostTraced, "pi2: capacity: expected 1 to ", kMostTraced,
                  " events per thread, found ", capacity, ". Leave it at torch_pi2.trace's default.");
  return pi2::trace_start(capacity);
}

// [n, 7]: thread, kind (0 span, 1 asynchronous, 2 counter), stage, nanoseconds of beginning and length, two arguments.
Tensor trace_stop() {
  const Trace trace = pi2::trace_stop();
  Tensor out = torch::stable::empty({trace.kept(), 7}, ScalarType::Long);
  auto* values = static_cast<int64_t*>(out.mutable_data_ptr());
  std::vector<int64_t> about = {-1, 0, 0, trace.lost};
  for (const TraceLane& lane : trace.lanes) {
    for (const int64_t value : {lane.number, int64_t{lane.io}, lane.system_id, lane.lost()}) about.push_back(value);
    for (int64_t i = 0; i < lane.kept(); ++i) {
      const TraceEvent& e = lane.events[static_cast<size_t>(i)];
      for (const int64_t value : {lane.number, static_cast<int64_t>(e.kind), static_cast<int64_t>(e.stage), e.begin_ns,
                                  e.duration_ns, e.args[0], e.args[1]})
        *values++ = value;
    }
  }
  const std::lock_guard<std::mutex> lock(threads_mutex);
  threads() = std::move(about);
  return out;
}

// [n, 4]: number (-1: threads without a lane), whether it belongs to a read engine, system id, events lost.
Tensor trace_threads() {
  const std::lock_guard<std::mutex> lock(threads_mutex);
  Tensor out = torch::stable::empty({static_cast<int64_t>(threads().size() / 4), 4}, ScalarType::Long);
  std::copy(threads().begin(), threads().end(), static_cast<int64_t*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace
}  // namespace pi2::binding

STABLE_TORCH_LIBRARY_FRAGMENT(pi2, m) {
  m.def("trace_start(int capacity) -> bool");
  m.def("trace_stop() -> Tensor");
  m.def("trace_threads() -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CompositeExplicitAutograd, m) {
  m.impl("trace_start", TORCH_BOX(&pi2::binding::trace_start));
  m.impl("trace_stop", TORCH_BOX(&pi2::binding::trace_stop));
  m.impl("trace_threads", TORCH_BOX(&pi2::binding::trace_threads));
}
