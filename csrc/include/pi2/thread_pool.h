// Threads for programs without a host framework: the C++ runner, tests, benchmarks. Not used inside PyTorch, which has
// its own (design D9).
#pragma once

#include <memory>

#include "pi2/types.h"

namespace pi2 {

// `threads` - 1 threads (fewer if the system gives no more) and the caller of run() work together. Between jobs the
// threads spin for at most 50 microseconds and then sleep, so that an idle pool costs nothing. Calls from several
// threads take turns. A call of run() from inside a body, of this or another pool, runs all its indices on that thread:
// all threads of the pool are busy with the outer job, and waiting for them would deadlock. (A job with a single index
// is simply called, and a nested call then has the whole pool.) If a body throws, run() rethrows the first exception
// once no thread is in a body any more.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // body(context, i) for every i in [0, n), each once, in any order; returns when all are done.
  void run(std::int64_t n, ParallelFor::Body body, void* context);

  // This pool as a ParallelFor; valid while the pool lives.
  ParallelFor parallel();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pi2
