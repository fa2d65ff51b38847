// The two rings that io_uring shares with the kernel, by the kernel's header and system calls alone. So every build for
// Linux has the engine, and the running system decides whether it is available.
#pragma once

// Not on Android, which kills apps that use it. Headers before Linux 5.6, the first with IORING_OP_READ, lack
// IO_URING_OP_SUPPORTED.
#if defined(__linux__) && !defined(__ANDROID__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#if defined(IO_URING_OP_SUPPORTED) && defined(__NR_io_uring_setup)
#define PI2_HAVE_URING

#include <cstddef>
#include <string>

namespace pi2 {

// One thread may call wait() and take() while others submit, under a lock of their own. Otherwise not thread-safe.
class KernelRing {
 public:
  KernelRing() = default;
  ~KernelRing();
  KernelRing(const KernelRing&) = delete;
  KernelRing& operator=(const KernelRing&) = delete;

  // Sets up a ring for `entries` reads in flight. Returns "" or why the kernel refuses.
  std::string open(unsigned entries);

  // The next free entry. With at most `entries` in flight there always is one, and no completion is dropped: that ring
  // is twice as large.
  io_uring_sqe* next();
  // Number of entries that the kernel has not taken.
  unsigned waiting() const;
  // Submits; returns how many entries the kernel took, or -errno.
  int submit();
  // Withdraws entries that the kernel has not taken: calls `take` with the user_data of each.
  template <typename Take>
  void withdraw(Take take) {
    const unsigned n = waiting();
    for (unsigned i = 0; i < n; ++i) take(entries_[(tail_ - n + i) & sq_mask_].user_data);
    tail_ -= n;
    __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
  }

  // Waits for a completion; returns 0 or -errno.
  int wait();
  // Copies and removes up to `most` completions.
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
  // Shared with the kernel: not std::atomic, but accessed with atomic operations.
  unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  const io_uring_cqe* completions_ = nullptr;
};

}  // namespace pi2
#endif
#endif
