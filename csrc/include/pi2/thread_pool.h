// The core's own threads, for programs without a host framework: the C++ runner, tests, benchmarks. Never inside
// PyTorch, which has its own (design D9).
#pragma once

#include <memory>

#include "pi2/types.h"

namespace pi2 {

// `threads` - 1 threads (fewer where the system gives no more) that help whoever calls run(); the caller works too.
// Between jobs they look out for the next one for at most 50 microseconds and then sleep, so that an idle pool costs
// nothing. Calls from several threads take turns. A call from inside a body, of this pool or of another, runs all its
// indices one after another on that thread: every thread of a pool is busy with the outer job already, and waiting for
// them would wait for itself. (A job of a single index is no job: its body is simply called, and what it calls has the
// whole pool.) What a body throws, the first if several do, run() throws when no thread is in a body any more.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // body(context, i) for every i in [0, n), each once, in any order; returns when all are done.
  void run(std::int64_t n, ParallelFor::Body body, void* context);

  // This pool as the core takes it; valid while the pool lives.
  ParallelFor parallel();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pi2
