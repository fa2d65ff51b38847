#include "pi2/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/thread_name.h"

namespace pi2 {
namespace {

constexpr std::chrono::microseconds kSpin{50};  // about the cost of waking a sleeping thread
constexpr int kLooks = 64;                      // polls between two reads of the clock

void pause() {
#if defined(PI2_HAVE_X86)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

thread_local bool inside_a_body = false;

}  // namespace

struct ThreadPool::State {
  // The job. Written only while `open` is false and no worker is `inside`; a worker that enters checks `open` first.
  ParallelFor::Body body = nullptr;
  void* context = nullptr;
  std::int64_t n = 0;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> open{false};
  std::atomic<int> inside{0};
  std::atomic<bool> thrown{false};
  std::exception_ptr first_thrown;  // by a body; written by the thread that set `thrown`

  std::atomic<std::uint64_t> jobs{0};  // started so far; workers wait for a change
  std::atomic<bool> stop{false};
  std::atomic<int> sleeping{0};
  std::mutex mutex;  // for `changed`
  std::condition_variable changed;
  std::mutex turn;  // held during a job
  std::vector<std::thread> workers;

  void work() {
    inside_a_body = true;
    for (std::int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < n;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      try {
        body(context, i);
      } catch (...) {
        if (!thrown.exchange(true)) first_thrown = std::current_exception();
      }
    }
    inside_a_body = false;
  }

  // Waits until `jobs` differs from `seen`.
  void wait(std::uint64_t seen) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < kLooks; ++i) {
        if (jobs.load() != seen) return;
        pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    std::unique_lock<std::mutex> lock(mutex);
    // First this, then a check of `jobs`; begin() does the reverse, so one of the two sees the other.
    sleeping.fetch_add(1);
    changed.wait(lock, [&] { return jobs.load() != seen; });
    sleeping.fetch_sub(1);
  }

  void begin() {
    jobs.fetch_add(1);
    if (sleeping.load() == 0) return;
    mutex.lock();  // a thread about to sleep then sleeps, and is notified
    mutex.unlock();
    changed.notify_all();
  }

  void loop() {
    std::uint64_t seen = 0;
    for (;;) {
      wait(seen);
      seen = jobs.load();
      if (stop.load()) return;
      inside.fetch_add(1);
      if (open.load()) work();
      inside.fetch_sub(1);
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  state_->workers.reserve(static_cast<std::size_t>(std::max(1, threads)));
  try {
    for (int i = 1; i < threads; ++i) {
      name_thread(state_->workers.emplace_back([state = state_.get()] { state->loop(); }), "pi2-compute");
    }
  } catch (const std::exception&) {  // a limit on threads, or no memory: goes on with fewer
  }
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true);
  state_->begin();
  for (std::thread& worker : state_->workers) worker.join();
}

int ThreadPool::threads() const { return static_cast<int>(state_->workers.size()) + 1; }

void ThreadPool::run(std::int64_t n, ParallelFor::Body body, void* context) {
  State& s = *state_;
  if (n <= 1 || s.workers.empty() || inside_a_body) {
    for (std::int64_t i = 0; i < n; ++i) body(context, i);
    return;
  }
  const std::lock_guard<std::mutex> lock(s.turn);
  s.body = body;
  s.context = context;
  s.n = n;
  s.next.store(0);
  s.open.store(true);
  s.begin();
  s.work();
  // First closes, then checks who is inside; a worker does the reverse, so one of the two sees the other.
  s.open.store(false);
  while (s.inside.load() != 0) std::this_thread::yield();
  if (s.thrown.exchange(false)) std::rethrow_exception(std::exchange(s.first_thrown, nullptr));
}

ParallelFor ThreadPool::parallel() {
  ParallelFor parallel;
  parallel.threads = threads();
  parallel.host = this;
  parallel.run = [](void* host, std::int64_t n, ParallelFor::Body body, void* context) {
    static_cast<ThreadPool*>(host)->run(n, body, context);
  };
  return parallel;
}

ParallelFor serial() {
  ParallelFor parallel;
  parallel.run = [](void*, std::int64_t n, ParallelFor::Body body, void* context) {
    for (std::int64_t i = 0; i < n; ++i) body(context, i);
  };
  return parallel;
}

}  // namespace pi2
