// io_uring: one system call submits many reads; one thread collects completions.
#include "pi2/read_engine.h"

#include "io/kernel_ring.h"

#if defined(PI2_HAVE_URING)
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/thread_name.h"
#include "base/trace.h"
#include "io/read_fully.h"

namespace pi2 {
namespace {

constexpr unsigned kMostAtOnce = 32;

class Uring final : public ReadEngine {
 public:
  Uring(int descriptor, ReadDone done) : descriptor_(descriptor), done_(done) {}

  // Returns "" or why io_uring is not available.
  std::string start(int depth) {
    std::string wrong = ring_.open(static_cast<unsigned>(depth));
    if (!wrong.empty()) return wrong;
    slots_.resize(static_cast<std::size_t>(depth));
    for (int i = depth - 1; i >= 0; --i) free_.push_back(i);
    plain_.reserve(slots_.size());
    try {
      reaper_ = std::thread([this] { reap(); });
      name_thread(reaper_, "pi2-read");
    } catch (const std::system_error&) {
      return "no thread could be started";
    }
    return "";
  }

  ~Uring() override {
    if (!reaper_.joinable()) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    some_.notify_all();
    reaper_.join();
  }

  void submit(const Read* reads, std::int64_t count) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.insert(queue_.end(), reads, reads + count);
    push();
    some_.notify_one();
  }

  const char* name() const override { return "io_uring"; }

 private:
  // Submits waiting reads while the ring has slots; needs the lock. Returns 0, or the errno of a kernel that takes none
  // for now.
  int push() {
    while (!queue_.empty() && !free_.empty()) {
      const int slot = free_.back();
      free_.pop_back();
      const Read& read = slots_[static_cast<std::size_t>(slot)] = queue_.front();
      queue_.pop_front();
      io_uring_sqe* entry = ring_.next();
      entry->opcode = read.n_parts > 0 ? IORING_OP_READV : IORING_OP_READ;
      entry->fd = descriptor_;
      entry->off = static_cast<std::uint64_t>(read.offset);
      entry->addr =
          read.n_parts > 0 ? reinterpret_cast<std::uintptr_t>(read.parts) : reinterpret_cast<std::uintptr_t>(read.into);
      entry->len = static_cast<std::uint32_t>(read.n_parts > 0 ? read.n_parts : read.bytes);
      entry->user_data = static_cast<std::uint64_t>(slot);
      ++under_way_;
    }
    // The kernel may take fewer, or none for now (no memory): the reaper tries again.
    while (ring_.waiting() > 0) {
      const int taken = ring_.submit();
      if (taken == -EINTR) continue;
      if (taken <= 0) return -taken;
    }
    return 0;
  }

  void reap() {
    trace_io_thread();
    for (;;) {
      bool nothing_taken = false;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        some_.wait(lock, [this] { return over_ || under_way_ > 0 || !queue_.empty(); });
        if (under_way_ == 0 && queue_.empty()) return;
        nothing_taken = static_cast<int>(ring_.waiting()) == under_way_;
      }
      io_uring_cqe entries[kMostAtOnce];
      // Takes all completions: one lock and one call of ReadDone for many of them.
      const bool asked = !nothing_taken && ring_.wait() == 0;
      const unsigned n = nothing_taken ? 0 : ring_.take(entries, kMostAtOnce);
      if (n == 0) {
        if (!asked) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        again();
        continue;
      }
      ReadResult over[kMostAtOnce];
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (unsigned i = 0; i < n; ++i) {
          const auto slot = static_cast<std::size_t>(entries[i].user_data);
          over[i].read = slots_[slot];
          free_.push_back(static_cast<int>(slot));
        }
        under_way_ -= static_cast<int>(n);
        push();
      }
      for (unsigned i = 0; i < n; ++i) over[i].error = outcome(over[i].read, entries[i].res);
      done_.call(done_.context, over, n);
    }
  }

  // Submits again what the kernel did not take. If it no longer takes any (a sandbox was entered), reads with pread.
  void again() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const int error = push();
      if (error == 0 || error == EAGAIN || error == EBUSY || error == ENOMEM) return;
      plain_.clear();
      ring_.withdraw([this](std::uint64_t slot) {
        plain_.push_back({slots_[static_cast<std::size_t>(slot)], 0});
        free_.push_back(static_cast<int>(slot));
      });
      under_way_ -= static_cast<int>(plain_.size());
    }
    for (ReadResult& result : plain_) result.error = read_fully(descriptor_, result.read);
    done_.call(done_.context, plain_.data(), static_cast<std::int64_t>(plain_.size()));
  }

  // The errno of a read whose completion is `result`. Short and interrupted reads are finished with pread.
  int outcome(const Read& read, int result) const {
    const int error = result < 0 ? -result : 0;
    const bool again = error == EINTR || error == EAGAIN || error == ECANCELED || (error == 0 && result < read.bytes);
    return again ? read_fully(descriptor_, read) : error;
  }

  int descriptor_;
  ReadDone done_;
  KernelRing ring_;
  std::mutex mutex_;
  std::condition_variable some_;
  std::deque<Read> queue_;
  std::vector<Read> slots_;
  std::vector<int> free_;
  std::vector<ReadResult> plain_;  // of the reaper; allocated in advance, because it must not allocate
  int under_way_ = 0;
  bool over_ = false;
  std::thread reaper_;
};

}  // namespace

std::unique_ptr<ReadEngine> uring_engine(int descriptor, int depth, ReadDone done, std::string* why) {
  auto engine = std::make_unique<Uring>(descriptor, done);
  const std::string wrong = engine->start(depth < 1 ? 1 : depth);
  if (wrong.empty()) return engine;
  if (why != nullptr) *why = wrong;
  return nullptr;
}

}  // namespace pi2
#else

namespace pi2 {

std::unique_ptr<ReadEngine> uring_engine(int, int, ReadDone, std::string* why) {
  if (why != nullptr) *why = "this build has none (Android, not Linux, or kernel headers before Linux 5.6)";
  return nullptr;
}

}  // namespace pi2
#endif
