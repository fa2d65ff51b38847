// Blocking reads on the engine's own threads (design D9): they sleep in the kernel, so more threads than cores pay.
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/thread_name.h"
#include "base/trace.h"
#include "io/read_fully.h"
#include "pi2/read_engine.h"

namespace pi2 {
namespace {

class PreadPool final : public ReadEngine {
 public:
  PreadPool(int descriptor, int threads, ReadDone done) : descriptor_(descriptor), done_(done) {
    threads_.reserve(static_cast<std::size_t>(threads));
    try {
      for (int i = 0; i < threads; ++i) name_thread(threads_.emplace_back([this] { work(); }), "pi2-read");
    } catch (const std::exception&) {  // a limit on threads, or no memory: goes on with fewer
    }
  }

  bool works() const { return !threads_.empty(); }

  ~PreadPool() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    some_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void submit(const Read* reads, std::int64_t count) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.insert(queue_.end(), reads, reads + count);
    }
    if (count == 1)
      some_.notify_one();
    else
      some_.notify_all();
  }

  const char* name() const override { return "pread"; }

 private:
  void work() {
    trace_io_thread();
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      some_.wait(lock, [this] { return over_ || !queue_.empty(); });
      if (queue_.empty()) return;  // closing, and the queue is empty
      const Read read = queue_.front();
      queue_.pop_front();
      lock.unlock();
      const ReadResult result{read, traced(read)};
      done_.call(done_.context, &result, 1);
      lock.lock();
    }
  }

  int traced(const Read& read) const {
    const TraceSpan span(Stage::kPread, read.bytes, read.offset);
    return read_fully(descriptor_, read);
  }

  int descriptor_;
  ReadDone done_;
  std::mutex mutex_;
  std::condition_variable some_;
  std::deque<Read> queue_;
  bool over_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<ReadEngine> pread_engine(int descriptor, int threads, ReadDone done, std::string* why) {
  auto pool = std::make_unique<PreadPool>(descriptor, threads < 1 ? 1 : threads, done);
  if (!pool->works()) {
    if (why != nullptr) *why = "no thread could be started for reading";
    return nullptr;
  }
  return pool;
}

}  // namespace pi2
