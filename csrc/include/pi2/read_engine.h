// How bytes come from a file, many requests at a time. One engine per file in csrc/io.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace pi2 {

// Offset, bytes, addresses and lengths of parts are multiples of 512 where the descriptor is direct.
struct Read {
  std::int64_t offset = 0, bytes = 0;
  char* into = nullptr;          // where all of it goes, if there are no parts
  const iovec* parts = nullptr;  // where it goes, one after another, `bytes` in all; valid until it is told of
  std::int64_t n_parts = 0;
  void* owner = nullptr;  // for whoever asked
};

// A read that is over: `error` is an errno, 0 if every byte is there.
struct ReadResult {
  Read read;
  int error = 0;
};

// What is told of reads that are over: by an I/O thread, in any order. Does not throw: nobody would catch it.
struct ReadDone {
  void (*call)(void* context, const ReadResult* results, std::int64_t count) = nullptr;
  void* context = nullptr;
};

class ReadEngine {
 public:
  virtual ~ReadEngine() = default;  // waits for what is under way
  // Returns soon; every read is told of once. Thread-safe. If it throws (no memory), none of them was begun.
  virtual void submit(const Read* reads, std::int64_t count) = 0;
  virtual const char* name() const = 0;
};

// Every engine is a line of io/engines.inc. Names in the order in which `auto` tries them.
std::vector<std::string> read_engines();
// In words, with one more before or after them where there is one: "auto, io_uring or pread".
std::string read_engine_choices(const char* before = nullptr, const char* after = nullptr);
bool is_read_engine(const std::string& name);

// The engine of that name, with up to `depth` reads at the device. Null where it cannot be had: `why`, if given, is
// told.
std::unique_ptr<ReadEngine> open_read_engine(const std::string& name, int descriptor, int depth, ReadDone done,
                                             std::string* why = nullptr);

// `threads` threads (as many as can be started; null if none can) that each wait for one pread at a time: everywhere,
// also where io_uring is forbidden (Android).
std::unique_ptr<ReadEngine> pread_engine(int descriptor, int threads, ReadDone done, std::string* why = nullptr);

// io_uring with up to `depth` reads at the device. Null where it is refused, by the kernel, by a sandbox or because the
// build has none: `why`, if given, is told.
std::unique_ptr<ReadEngine> uring_engine(int descriptor, int depth, ReadDone done, std::string* why = nullptr);

}  // namespace pi2
