// torch.ops.pi2.read_rates: measures how fast an engine reads a file, for the hardware profile. Discards the bytes.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#include "bindings/torch/common.h"
#include "pi2/read_engine.h"

namespace pi2::binding {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kAlignment = 4096;

double cpu_seconds() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};

// A closed loop: whenever a read ends the next one starts, until the time is up.
class Loop {
 public:
  Loop(int64_t block, int64_t blocks, int64_t depth, bool sequential, double seconds)
      : block_(block), blocks_(blocks), depth_(depth), sequential_(sequential), seconds_(seconds) {
    memory_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, static_cast<std::size_t>(block * depth))));
    STD_TORCH_CHECK(memory_ != nullptr, "pi2: reads: expected memory for ", depth, " blocks of ", block,
                    " bytes, found none. Read less at a time.");
    std::memset(memory_.get(), 0, static_cast<std::size_t>(block * depth));  // takes page faults now, not while reading
  }

  static void told(void* self, const ReadResult* results, int64_t count) {
    static_cast<Loop*>(self)->over(results, count);
  }

  void run(ReadEngine& engine) {
    engine_ = &engine;
    std::vector<Read> first;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (int64_t i = 0; i < depth_; ++i) first.push_back(next(memory_.get() + i * block_));
      under_way_ = depth_;
    }
    started_ = Clock::now();
    cpu_before_ = cpu_seconds();
    engine.submit(first.data(), depth_);
    std::unique_lock<std::mutex> lock(mutex_);
    all_.wait(lock, [this] { return under_way_ == 0; });
  }

  int64_t reads() const { return reads_; }
  int error() const { return error_; }
  double wall() const { return wall_; }
  double cpu() const { return cpu_; }

 private:
  // Needs the lock.
  Read next(char* into) {
    int64_t block = at_++;
    if (!sequential_) {
      state_ ^= state_ << 13;
      state_ ^= state_ >> 7;
      state_ ^= state_ << 17;
      block = static_cast<int64_t>(state_ >> 1);
    }
    Read read;
    read.offset = block % blocks_ * block_;
    read.bytes = block_;
    read.into = into;
    return read;
  }

  void over(const ReadResult* results, int64_t count) {
    std::vector<Read> more;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const double wall = std::chrono::duration<double>(Clock::now() - started_).count();
      for (int64_t i = 0; i < count; ++i) {
        if (results[i].error != 0) error_ = results[i].error;
        // Reads that end after the time, at a lower depth, do not count; but at least one read does.
        const bool counts = wall < seconds_ || reads_ == 0;
        if (counts) ++reads_;
        if (counts) wall_ = wall;
        if (wall < seconds_ && error_ == 0) more.push_back(next(results[i].read.into));
      }
      if (wall >= seconds_ && cpu_ == 0) cpu_ = cpu_seconds() - cpu_before_;
      if (error_ != 0) more.clear();
      under_way_ += static_cast<int64_t>(more.size()) - count;
      if (under_way_ == 0) all_.notify_all();
    }
    if (!more.empty()) engine_->submit(more.data(), static_cast<int64_t>(more.size()));
  }

  const int64_t block_, blocks_, depth_;
  const bool sequential_;
  const double seconds_;
  std::unique_ptr<char, Free> memory_;
  ReadEngine* engine_ = nullptr;
  Clock::time_point started_;
  std::mutex mutex_;
  std::condition_variable all_;
  std::uint64_t state_ = 0x9e3779b97f4a7c15;
  int64_t at_ = 0, under_way_ = 0, reads_ = 0;
  int error_ = 0;
  double wall_ = 0, cpu_ = 0, cpu_before_ = 0;
};

// float64 [3]: reads that ended within `seconds`, the seconds that they took, and CPU seconds of the process meanwhile.
// engine: one of read_engines(); [0, 0, 0] if it is not available.
Tensor read_rates(const Text& path, const Text& engine, bool direct, int64_t block_bytes, int64_t depth,
                  int64_t range_bytes, bool sequential, double seconds) {
  STD_TORCH_CHECK(is_read_engine(engine), "pi2: engine: expected ", read_engine_choices(), ", found '", engine,
                  "'. Choose one of them.");
  STD_TORCH_CHECK(block_bytes >= kAlignment && block_bytes % kAlignment == 0 && depth >= 1 && depth <= 1024 &&
                      range_bytes >= block_bytes && seconds > 0,
                  "pi2: reads: expected blocks of a multiple of ", kAlignment,
                  " bytes, a depth of 1 to 1024, a range of a block at least and some time, found ", block_bytes, ", ",
                  depth, ", ", range_bytes, " and ", seconds, ". Correct them.");
  int flags = O_RDONLY | O_CLOEXEC;
#ifdef O_DIRECT
  if (direct) flags |= O_DIRECT;
#endif
  const Descriptor file{::open(path.c_str(), flags)};
  STD_TORCH_CHECK(file.number >= 0, "pi2: reads: expected a file that can be read", direct ? " directly" : "", " at ",
                  path, ", found: ", std::strerror(errno), ". Choose another one.");
  const off_t size = ::lseek(file.number, 0, SEEK_END);
  STD_TORCH_CHECK(size >= range_bytes, "pi2: reads: expected a file of ", range_bytes, " bytes at ", path, ", found ",
                  static_cast<int64_t>(size), ". Make it larger.");
  Loop loop(block_bytes, range_bytes / block_bytes, depth, sequential, seconds);
  {
    const ReadDone done{&Loop::told, &loop};
    const auto reader = open_read_engine(engine, file.number, static_cast<int>(depth), done);
    if (reader != nullptr) loop.run(*reader);
  }
  STD_TORCH_CHECK(loop.error() == 0, "pi2: reads: expected ", path, " to be read, found: ", std::strerror(loop.error()),
                  ". Choose another file, or read it indirectly.");
  Tensor out = torch::stable::empty({3}, ScalarType::Double);
  auto* values = static_cast<double*>(out.mutable_data_ptr());
  values[0] = static_cast<double>(loop.reads());
  values[1] = loop.wall();
  values[2] = loop.cpu();
  return out;
}

}  // namespace
}  // namespace pi2::binding

STABLE_TORCH_LIBRARY_FRAGMENT(pi2, m) {
  m.def(
      "read_rates(str path, str engine, bool direct, int block_bytes, int depth, int range_bytes, bool sequential, "
      "float seconds) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CompositeExplicitAutograd, m) {
  m.impl("read_rates", TORCH_BOX(&pi2::binding::read_rates));
}
