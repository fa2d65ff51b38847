// The two rings that io_uring shares with the kernel, through the kernel's own header and system calls: so that the
// engine is in every build for Linux, and what decides is the system it runs on.
#pragma once

// Not on Android, where apps that ask for it are killed. Headers before Linux 5.6, the first to read plainly, have no
// IO_URING_OP_SUPPORTED.
#if defined(__linux__) && !defined(__ANDROID__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#if defined(IO_URING_OP_SUPPORTED) && defined(__NR_io_uring_setup)
#define PI2_HAVE_URING

#include <cstddef>
#include <string>

namespace pi2 {

// Not thread-safe but for wait() and take() beside the rest: one thread collects, others submit with a lock of theirs.
class KernelRing {
 public:
  KernelRing() = default;
  ~KernelRing();
  KernelRing(const KernelRing&) = delete;
  KernelRing& operator=(const KernelRing&) = delete;

  // Room for `entries` under way; "" or why the kernel refuses.
  std::string open(unsigned entries);

  // An empty entry to be filled. Whoever has no more than `entries` under way always finds one, and no completion is
  // ever dropped: the ring of those has twice the room.
  io_uring_sqe* next();
  // Entries that the kernel has not taken.
  unsigned waiting() const;
  // How many it takes now, or -errno.
  int submit();
  // Takes back what waits: calls `take` with the user_data of each.
  template <typename Take>
  void withdraw(Take take) {
    const unsigned n = waiting();
    for (unsigned i = 0; i < n; ++i) take(entries_[(tail_ - n + i) & sq_mask_].user_data);
    tail_ -= n;
    __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
  }

  // Returns once there is a completion: 0 or -errno.
  int wait();
  // Copies up to `most` completions and makes room for others.
  unsigned take(io_uring_cqe* out, unsigned most);

 private:
  std::string map(const io_uring_params& p);
  std::string probe() const;
  std::string try_once();

  int ring_ = -1;
  char* memory_ = nullptr;
  std::size_t memory_bytes_ = 0, entries_bytes_ = 0;
  io_uring_sqe* entries_ = nullptr;
  unsigned tail_ = 0, sq_mask_ = 0, cq_mask_ = 0;
  // Shared with the kernel: which is why they are not std::atomic, but read and written as if.
  unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  const io_uring_cqe* completions_ = nullptr;
};

}  // namespace pi2
#endif
#endif
