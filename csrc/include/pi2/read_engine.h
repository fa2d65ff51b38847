// How bytes come from a file, many requests at a time. One engine per file in csrc/io.
#pragma once

#include <cstdint>
#include <memory>

namespace pi2 {

struct Read {
  std::int64_t offset = 0, bytes = 0;  // multiples of 512 where the descriptor is direct, as is the address of `into`
  char* into = nullptr;
  void* owner = nullptr;  // for whoever asked
};

// What is told when a read is over: by an I/O thread, in any order. `error` is an errno, 0 if every byte is there.
struct ReadDone {
  void (*call)(void* context, const Read& read, int error) = nullptr;
  void* context = nullptr;
};

class ReadEngine {
 public:
  virtual ~ReadEngine() = default;  // waits for what is under way
  // Returns soon; every read is told of once. Thread-safe.
  virtual void submit(const Read* reads, std::int64_t count) = 0;
  virtual const char* name() const = 0;
};

// `threads` threads (as many as can be started; null if none can) that each wait for one pread at a time: everywhere,
// also where io_uring is forbidden (Android).
std::unique_ptr<ReadEngine> pread_engine(int descriptor, int threads, ReadDone done);

// io_uring with up to `depth` reads at the device; null where the kernel or the build has none.
std::unique_ptr<ReadEngine> uring_engine(int descriptor, int depth, ReadDone done);

}  // namespace pi2
