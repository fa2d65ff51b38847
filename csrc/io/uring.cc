// io_uring: many reads at the device and one system call for all of them; one thread reaps.
#include "pi2/read_engine.h"

#if defined(PI2_HAVE_URING)
#include <liburing.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "core/store_file.h"

namespace pi2 {
namespace {

class Uring final : public ReadEngine {
 public:
  Uring(int descriptor, ReadDone done) : descriptor_(descriptor), done_(done) {}

  bool start(int depth) {
    if (io_uring_queue_init(static_cast<unsigned>(depth), &ring_, 0) != 0) return false;
    slots_.resize(static_cast<std::size_t>(depth));
    for (int i = depth - 1; i >= 0; --i) free_.push_back(i);
    reaper_ = std::thread([this] { reap(); });
    return true;
  }

  ~Uring() override {
    if (!reaper_.joinable()) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    some_.notify_all();
    reaper_.join();
    io_uring_queue_exit(&ring_);
  }

  void submit(const Read* reads, std::int64_t count) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.insert(queue_.end(), reads, reads + count);
    push();
    some_.notify_one();
  }

  const char* name() const override { return "io_uring"; }

 private:
  // Hands waiting reads to the kernel while there are slots; with the lock.
  void push() {
    bool any = false;
    while (!queue_.empty() && !free_.empty()) {
      io_uring_sqe* entry = io_uring_get_sqe(&ring_);
      if (entry == nullptr) break;
      const int slot = free_.back();
      free_.pop_back();
      const Read& read = slots_[static_cast<std::size_t>(slot)] = queue_.front();
      queue_.pop_front();
      io_uring_prep_read(entry, descriptor_, read.into, static_cast<unsigned>(read.bytes),
                         static_cast<unsigned long long>(read.offset));
      io_uring_sqe_set_data64(entry, static_cast<unsigned long long>(slot));
      ++under_way_;
      any = true;
    }
    if (any) {
      while (io_uring_submit(&ring_) == -EINTR) {
      }
    }
  }

  void reap() {
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        some_.wait(lock, [this] { return over_ || under_way_ > 0; });
        if (under_way_ == 0) return;
      }
      io_uring_cqe* entry = nullptr;
      const int failed = io_uring_wait_cqe(&ring_, &entry);
      if (failed == -EINTR) continue;
      const auto slot = static_cast<std::size_t>(io_uring_cqe_get_data64(entry));
      const int result = entry->res;
      io_uring_cqe_seen(&ring_, entry);
      Read read;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        read = slots_[slot];
        free_.push_back(static_cast<int>(slot));
        --under_way_;
        push();
      }
      int error = result < 0 ? -result : 0;
      // Short reads and interruptions are finished the plain way.
      if (error == EINTR || error == EAGAIN || (error == 0 && result < read.bytes))
        error = read_fully(descriptor_, read.into, read.bytes, read.offset);
      done_.call(done_.context, read, error);
    }
  }

  int descriptor_;
  ReadDone done_;
  io_uring ring_{};
  std::mutex mutex_;
  std::condition_variable some_;
  std::deque<Read> queue_;
  std::vector<Read> slots_;
  std::vector<int> free_;
  int under_way_ = 0;
  bool over_ = false;
  std::thread reaper_;
};

}  // namespace

std::unique_ptr<ReadEngine> uring_engine(int descriptor, int depth, ReadDone done) {
  auto engine = std::make_unique<Uring>(descriptor, done);
  if (!engine->start(depth < 1 ? 1 : depth)) return nullptr;
  return engine;
}

}  // namespace pi2
#else

namespace pi2 {

std::unique_ptr<ReadEngine> uring_engine(int, int, ReadDone) { return nullptr; }

}  // namespace pi2
#endif
