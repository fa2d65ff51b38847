// Read engines: many reads of a file at a time. One engine per file in csrc/io.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace pi2 {

// With O_DIRECT the offset, bytes, addresses and lengths of parts are multiples of 512.
struct Read {
  std::int64_t offset = 0, bytes = 0;
  char* into = nullptr;          // destination, if there are no parts
  const iovec* parts = nullptr;  // destinations in order, `bytes` in all; valid until the read ends
  std::int64_t n_parts = 0;
  void* owner = nullptr;  // for the caller
};

// A read that has ended: `error` is an errno, 0 if all bytes were read.
struct ReadResult {
  Read read;
  int error = 0;
};

// Called by an I/O thread for reads that have ended, in any order. Must not throw: nothing would catch it.
struct ReadDone {
  void (*call)(void* context, const ReadResult* results, std::int64_t count) = nullptr;
  void* context = nullptr;
};

class ReadEngine {
 public:
  virtual ~ReadEngine() = default;  // waits for reads in flight
  // Returns soon; ReadDone gets every read once. Thread-safe. If it throws (no memory), no read was started.
  virtual void submit(const Read* reads, std::int64_t count) = 0;
  virtual const char* name() const = 0;
};

// The names of io/engines.inc, in the order in which `auto` tries them.
std::vector<std::string> read_engines();
// The names as text, with a further one before or after: "auto, io_uring or pread".
std::string read_engine_choices(const char* before = nullptr, const char* after = nullptr);
bool is_read_engine(const std::string& name);

// Opens the engine of that name, with up to `depth` reads at the device. Returns null where it is not available and
// sets `why`, if given.
std::unique_ptr<ReadEngine> open_read_engine(const std::string& name, int descriptor, int depth, ReadDone done,
                                             std::string* why = nullptr);

// `threads` threads (as many as can be started; null if none can), each with one pread at a time. Works everywhere,
// also where io_uring is forbidden (Android).
std::unique_ptr<ReadEngine> pread_engine(int descriptor, int threads, ReadDone done, std::string* why = nullptr);

// io_uring with up to `depth` reads at the device. Returns null where the kernel or a sandbox refuses it, or the build
// has none; sets `why`, if given.
std::unique_ptr<ReadEngine> uring_engine(int descriptor, int depth, ReadDone done, std::string* why = nullptr);

}  // namespace pi2
