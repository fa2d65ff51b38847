#include "io/simulated.h"

#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/trace.h"

namespace pi2 {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kMostAtOnce = 64;

// A read in flight; the owner of the inner engine's read.
struct Pending {
  ReadResult result;  // with the caller's read
  Clock::time_point due;
};

bool later(const std::unique_ptr<Pending>& a, const std::unique_ptr<Pending>& b) { return a->due > b->due; }

class Simulated final : public ReadEngine {
 public:
  Simulated(DeviceModel model, ReadDone done, std::atomic<std::int64_t>* late)
      : model_(std::move(model)), done_(done), late_(late) {}

  bool start(const std::function<std::unique_ptr<ReadEngine>(ReadDone)>& inner) {
    inner_ = inner({[](void* self, const ReadResult* results, std::int64_t count) {
                      static_cast<Simulated*>(self)->arrived(results, count);
                    },
                    this});
    if (inner_ == nullptr) return false;
    name_ = std::string("simulated device over ") + inner_->name();
    try {
      timer_ = std::thread([this] { pass_on(); });
    } catch (const std::system_error&) {
      return false;
    }
    return true;
  }

  ~Simulated() override {
    inner_.reset();  // everything is in due_ after this
    if (!timer_.joinable()) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    some_.notify_one();
    timer_.join();
  }

  void submit(const Read* reads, std::int64_t count) override {
    const auto n = static_cast<std::size_t>(count);
    std::vector<Read> inner(reads, reads + count);
    std::vector<std::unique_ptr<Pending>> pending(n);
    for (std::size_t i = 0; i < n; ++i) {
      pending[i] = std::make_unique<Pending>();
      pending[i]->result.read = reads[i];
      inner[i].owner = pending[i].get();
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      due_.reserve(under_way_ + n);  // so that passing on a read allocates nothing
      const double now = std::chrono::duration<double>(Clock::now() - start_).count();
      for (std::unique_ptr<Pending>& p : pending) {
        const double end = model_.finish(now, p->result.read.offset, p->result.read.bytes);
        p->due = start_ + std::chrono::nanoseconds(static_cast<std::int64_t>(std::ceil(end * 1e9)));
      }
      under_way_ += n;
    }
    try {
      inner_->submit(inner.data(), count);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      under_way_ -= n;
      throw;
    }
    // Some may have ended already: from here on arrived() owns them.
    for (std::unique_ptr<Pending>& p : pending) (void)p.release();
  }

  const char* name() const override { return name_.c_str(); }

 private:
  // On the inner engine's threads. Reads that are already due (the device would have been faster) are passed on at
  // once.
  void arrived(const ReadResult* results, std::int64_t count) {
    ReadResult late[kMostAtOnce];
    std::int64_t n_late = 0;
    bool earliest = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const Clock::time_point now = Clock::now();
      for (; count > 0 && n_late < kMostAtOnce; ++results, --count) {
        std::unique_ptr<Pending> p(static_cast<Pending*>(results->read.owner));
        p->result.error = results->error;
        if (p->due <= now) {
          late[n_late++] = p->result;
          continue;
        }
        const Pending* added = p.get();
        due_.push_back(std::move(p));
        std::push_heap(due_.begin(), due_.end(), later);
        earliest = earliest || due_.front().get() == added;
      }
      under_way_ -= static_cast<std::size_t>(n_late);
    }
    if (earliest) some_.notify_one();
    if (n_late > 0) {
      if (late_ != nullptr) late_->fetch_add(n_late, std::memory_order_relaxed);
      done_.call(done_.context, late, n_late);
    }
    if (count > 0) arrived(results, count);
  }

  // On the timer's thread: passes on all reads that are due.
  void pass_on() {
    trace_io_thread();
#if defined(__linux__)
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL,
          0UL);  // ns, for this thread; the default is 50 us, the time of a dozen small reads
#endif
    ReadResult results[kMostAtOnce];
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (due_.empty()) {
        if (over_) return;
        some_.wait(lock);
        continue;
      }
      const Clock::time_point now = Clock::now(), first = due_.front()->due;
      if (first > now) {
        some_.wait_until(lock, first);
        continue;
      }
      std::int64_t n = 0;
      for (; n < kMostAtOnce && !due_.empty() && due_.front()->due <= now; ++n) {
        std::pop_heap(due_.begin(), due_.end(), later);
        results[n] = due_.back()->result;
        due_.pop_back();
      }
      under_way_ -= static_cast<std::size_t>(n);
      lock.unlock();
      done_.call(done_.context, results, n);
      lock.lock();
    }
  }

  DeviceModel model_;
  ReadDone done_;
  std::atomic<std::int64_t>* late_;
  std::string name_;
  const Clock::time_point start_ = Clock::now();
  std::mutex mutex_;
  std::condition_variable some_;
  std::vector<std::unique_ptr<Pending>> due_;  // a heap of reads that ended early, by due time
  std::size_t under_way_ = 0;                  // submitted and not passed on
  bool over_ = false;
  std::unique_ptr<ReadEngine> inner_;
  std::thread timer_;
};

}  // namespace

std::unique_ptr<ReadEngine> simulated_engine(DeviceModel model,
                                             const std::function<std::unique_ptr<ReadEngine>(ReadDone)>& inner,
                                             ReadDone done, std::atomic<std::int64_t>* late) {
  auto engine = std::make_unique<Simulated>(std::move(model), done, late);
  if (!engine->start(inner)) return nullptr;
  return engine;
}

}  // namespace pi2
