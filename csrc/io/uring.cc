// io_uring: many reads at the device and one system call for all of them; one thread reaps.
#include "pi2/read_engine.h"

#if defined(PI2_HAVE_URING)
#include <liburing.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/store_file.h"
#include "core/trace.h"

namespace pi2 {
namespace {

constexpr unsigned kMostAtOnce = 32;

class Uring final : public ReadEngine {
 public:
  Uring(int descriptor, ReadDone done) : descriptor_(descriptor), done_(done) {}

  bool start(int depth) {
    if (io_uring_queue_init(static_cast<unsigned>(depth), &ring_, 0) != 0) return false;
    io_uring_probe* probe = io_uring_get_probe_ring(&ring_);  // kernels before 5.6 have no plain reads, nor probes
    const bool reads = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) != 0;
    io_uring_free_probe(probe);
    if (!reads) {
      io_uring_queue_exit(&ring_);
      return false;
    }
    slots_.resize(static_cast<std::size_t>(depth));
    for (int i = depth - 1; i >= 0; --i) free_.push_back(i);
    try {
      reaper_ = std::thread([this] { reap(); });
    } catch (const std::system_error&) {
      io_uring_queue_exit(&ring_);
      return false;
    }
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
    while (!queue_.empty() && !free_.empty()) {
      io_uring_sqe* entry = io_uring_get_sqe(&ring_);
      if (entry == nullptr) break;
      const int slot = free_.back();
      free_.pop_back();
      const Read& read = slots_[static_cast<std::size_t>(slot)] = queue_.front();
      queue_.pop_front();
      const auto offset = static_cast<unsigned long long>(read.offset);
      if (read.n_parts > 0)
        io_uring_prep_readv(entry, descriptor_, read.parts, static_cast<unsigned>(read.n_parts), offset);
      else
        io_uring_prep_read(entry, descriptor_, read.into, static_cast<unsigned>(read.bytes), offset);
      io_uring_sqe_set_data64(entry, static_cast<unsigned long long>(slot));
      ++under_way_;
    }
    // The kernel may take fewer than it was given, or none for now (no memory): the reaper tries again.
    while (io_uring_sq_ready(&ring_) > 0) {
      const int taken = io_uring_submit(&ring_);
      if (taken == -EINTR) continue;
      if (taken <= 0) break;
    }
  }

  void reap() {
    trace_io_thread();
    for (;;) {
      bool nothing_taken = false;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        some_.wait(lock, [this] { return over_ || under_way_ > 0; });
        if (under_way_ == 0) return;
        nothing_taken = static_cast<int>(io_uring_sq_ready(&ring_)) == under_way_;
      }
      io_uring_cqe* entry = nullptr;
      if (nothing_taken || io_uring_wait_cqe(&ring_, &entry) != 0 || entry == nullptr) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const std::lock_guard<std::mutex> lock(mutex_);
        push();
        continue;
      }
      // All that are there: one lock, and one call for whoever asked, for many of them.
      io_uring_cqe* entries[kMostAtOnce];
      const unsigned n = io_uring_peek_batch_cqe(&ring_, entries, kMostAtOnce);
      std::size_t slots[kMostAtOnce];
      int results[kMostAtOnce];
      for (unsigned i = 0; i < n; ++i) {
        slots[i] = static_cast<std::size_t>(io_uring_cqe_get_data64(entries[i]));
        results[i] = entries[i]->res;
      }
      io_uring_cq_advance(&ring_, n);
      ReadResult over[kMostAtOnce];
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (unsigned i = 0; i < n; ++i) {
          over[i].read = slots_[slots[i]];
          free_.push_back(static_cast<int>(slots[i]));
        }
        under_way_ -= static_cast<int>(n);
        push();
      }
      for (unsigned i = 0; i < n; ++i) over[i].error = outcome(over[i].read, results[i]);
      done_.call(done_.context, over, n);
    }
  }

  // The errno of a read of which the kernel says `result`. Short reads and interruptions are finished the plain way.
  int outcome(const Read& read, int result) const {
    const int error = result < 0 ? -result : 0;
    const bool again = error == EINTR || error == EAGAIN || error == ECANCELED || (error == 0 && result < read.bytes);
    return again ? read_fully(descriptor_, read) : error;
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
