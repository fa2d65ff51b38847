#include "io/kernel_ring.h"

#if defined(PI2_HAVE_URING)
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace pi2 {
namespace {

constexpr char kTooOld[] = "this kernel is older than Linux 5.6";

// The value of a system call, or -errno.
template <typename... Arguments>
int call(long number, Arguments... arguments) {
  const long value = syscall(number, arguments...);
  return value < 0 ? -errno : static_cast<int>(value);
}

int enter(int ring, unsigned submit, unsigned complete) {
  const unsigned flags = complete > 0 ? IORING_ENTER_GETEVENTS : 0;
  return call(__NR_io_uring_enter, ring, submit, complete, flags, nullptr, 0);
}

std::string refused(const char* what, int error) {
  return std::string("the kernel refuses ") + what + ": " + std::strerror(error);
}

}  // namespace

KernelRing::~KernelRing() {
  if (entries_ != nullptr) munmap(entries_, entries_bytes_);
  if (memory_ != nullptr) munmap(memory_, memory_bytes_);
  if (ring_ >= 0) close(ring_);
}

std::string KernelRing::open(unsigned entries) {
  io_uring_params p{};
  ring_ = call(__NR_io_uring_setup, entries, &p);
  if (ring_ < 0) return refused("io_uring_setup", -ring_);
  // Both are older than IORING_OP_READ, but an emulation may lack them.
  if ((p.features & IORING_FEAT_SINGLE_MMAP) == 0 || (p.features & IORING_FEAT_NODROP) == 0) return kTooOld;
  std::string wrong = map(p);
  if (wrong.empty()) wrong = probe();
  return wrong.empty() ? try_once() : wrong;
}

std::string KernelRing::map(const io_uring_params& p) {
  const auto share = [this](std::size_t bytes, unsigned long long what) -> void* {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, static_cast<off_t>(what));
    return at == MAP_FAILED ? nullptr : at;
  };
  memory_bytes_ =
      std::max(p.sq_off.array + p.sq_entries * sizeof(unsigned), p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe));
  entries_bytes_ = p.sq_entries * sizeof(io_uring_sqe);
  memory_ = static_cast<char*>(share(memory_bytes_, IORING_OFF_SQ_RING));
  if (memory_ == nullptr) return refused("memory of a ring", errno);
  entries_ = static_cast<io_uring_sqe*>(share(entries_bytes_, IORING_OFF_SQES));
  if (entries_ == nullptr) return refused("memory of a ring", errno);
  const auto number = [this](unsigned offset) { return reinterpret_cast<unsigned*>(memory_ + offset); };
  sq_head_ = number(p.sq_off.head);
  sq_tail_ = number(p.sq_off.tail);
  sq_mask_ = *number(p.sq_off.ring_mask);
  cq_head_ = number(p.cq_off.head);
  cq_tail_ = number(p.cq_off.tail);
  cq_mask_ = *number(p.cq_off.ring_mask);
  completions_ = reinterpret_cast<const io_uring_cqe*>(memory_ + p.cq_off.cqes);
  tail_ = *sq_tail_;
  // Entries are submitted in array order.
  for (unsigned i = 0; i < p.sq_entries; ++i) number(p.sq_off.array)[i] = i;
  return "";
}

// Whether the kernel has IORING_OP_READ: Linux 5.6 introduced it together with this probe.
std::string KernelRing::probe() const {
  constexpr unsigned kMost = IORING_OP_READ + 1;
  alignas(io_uring_probe) unsigned char room[sizeof(io_uring_probe) + kMost * sizeof(io_uring_probe_op)] = {};
  const int said = call(__NR_io_uring_register, ring_, IORING_REGISTER_PROBE, room, kMost);
  if (said == -EINVAL) return kTooOld;
  if (said < 0) return refused("io_uring_register", -said);
  const auto* found = reinterpret_cast<const io_uring_probe*>(room);
  for (const int operation : {IORING_OP_READV, IORING_OP_READ})
    if (operation >= found->ops_len || (found->ops[operation].flags & IO_URING_OP_SUPPORTED) == 0) return kTooOld;
  return "";
}

// Submits a no-op: a sandbox that refuses only the use of io_uring is noticed now.
std::string KernelRing::try_once() {
  next()->opcode = IORING_OP_NOP;
  int said;
  while ((said = submit()) == -EINTR) continue;
  if (said == 1)
    while ((said = wait()) == -EINTR) continue;
  io_uring_cqe nothing;
  if (said < 0 || take(&nothing, 1) != 1) return refused("io_uring_enter", said < 0 ? -said : EIO);
  return "";
}

io_uring_sqe* KernelRing::next() {
  io_uring_sqe* entry = &entries_[tail_ & sq_mask_];
  std::memset(entry, 0, sizeof *entry);
  ++tail_;
  return entry;
}

unsigned KernelRing::waiting() const { return tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE); }

int KernelRing::submit() {
  __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
  return enter(ring_, waiting(), 0);
}

int KernelRing::wait() {
  if (__atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE) != __atomic_load_n(cq_head_, __ATOMIC_RELAXED)) return 0;
  const int said = enter(ring_, 0, 1);
  return said < 0 ? said : 0;
}

unsigned KernelRing::take(io_uring_cqe* out, unsigned most) {
  const unsigned head = __atomic_load_n(cq_head_, __ATOMIC_RELAXED);
  const unsigned n = std::min(__atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE) - head, most);
  for (unsigned i = 0; i < n; ++i) out[i] = completions_[(head + i) & cq_mask_];
  __atomic_store_n(cq_head_, head + n, __ATOMIC_RELEASE);
  return n;
}

}  // namespace pi2
#endif
