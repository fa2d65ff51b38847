// io_uring where the kernel has it: what it reads, in all depths; and the kernel refusing each of its calls, before it
// is begun and behind its back. Says what there was to be tested.
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "io/kernel_ring.h"
#include "pi2/read_engine.h"
#include "tests/check.h"

#if defined(PI2_HAVE_URING)
#include "tests/sandbox.h"
#endif

namespace {

using namespace pi2;

constexpr std::int64_t kFileBytes = 1 << 20;

struct File {
  std::vector<char> bytes = std::vector<char>(kFileBytes);
  int descriptor = -1;

  explicit File(std::mt19937& rng) {
    for (char& byte : bytes) byte = static_cast<char>(rng());
    char path[] = "/tmp/pi2-uring-XXXXXX";
    descriptor = mkstemp(path);
    unlink(path);
    PI2_CHECK(write(descriptor, bytes.data(), bytes.size()) == kFileBytes, "no file");
  }
  ~File() { close(descriptor); }
};

struct Told {
  std::mutex mutex;
  std::condition_variable some;
  std::vector<int> times, errors;
  int count = 0;

  explicit Told(int reads) : times(static_cast<std::size_t>(reads)), errors(times.size()) {}
  ReadDone done() {
    return {[](void* self, const ReadResult* results, std::int64_t n) {
              auto& told = *static_cast<Told*>(self);
              const std::lock_guard<std::mutex> lock(told.mutex);
              for (std::int64_t i = 0; i < n; ++i) {
                const auto k = static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(results[i].read.owner));
                ++told.times[k];
                told.errors[k] = results[i].error;
              }
              told.count += static_cast<int>(n);
              told.some.notify_all();
            },
            this};
  }
  void wait(int reads) {
    std::unique_lock<std::mutex> lock(mutex);
    some.wait(lock, [&] { return count >= reads; });
  }
};

// `n` reads of one or many parts, of which every tenth lies beyond the file's end.
struct Reads {
  std::vector<std::vector<char>> into;
  std::vector<std::vector<iovec>> parts;
  std::vector<Read> reads;

  Reads(std::mt19937& rng, int n) : into(static_cast<std::size_t>(n)), parts(into.size()), reads(into.size()) {
    for (std::size_t i = 0; i < reads.size(); ++i) {
      Read& read = reads[i];
      read.bytes = 1 + static_cast<std::int64_t>(rng() % 9000);
      read.offset = beyond(i) ? kFileBytes - read.bytes / 2 : static_cast<std::int64_t>(rng() % (kFileBytes - 9000));
      read.owner = reinterpret_cast<void*>(i);
      into[i].resize(static_cast<std::size_t>(read.bytes));
      read.into = into[i].data();
      if (rng() % 2 == 0) continue;
      for (std::int64_t at = 0; at < read.bytes;) {
        const std::int64_t bytes = std::min<std::int64_t>(read.bytes - at, 1 + static_cast<std::int64_t>(rng() % 3000));
        parts[i].push_back({read.into + at, static_cast<std::size_t>(bytes)});
        at += bytes;
      }
      read.parts = parts[i].data();
      read.n_parts = static_cast<std::int64_t>(parts[i].size());
      read.into = nullptr;
    }
  }
  static bool beyond(std::size_t i) { return i % 10 == 7; }
  void check(const File& file, const Told& told) const {
    for (std::size_t i = 0; i < reads.size(); ++i) {
      PI2_CHECK(told.times[i] == 1, "read %zu was told of %d times", i, told.times[i]);
      PI2_CHECK((told.errors[i] != 0) == beyond(i), "read %zu: error %d", i, told.errors[i]);
      if (!beyond(i))
        PI2_CHECK(std::equal(into[i].begin(), into[i].end(), file.bytes.begin() + reads[i].offset), "read %zu", i);
    }
  }
};

long check_reads(std::mt19937& rng, const File& file, int depth, int submitters, int n) {
  Told told(n);
  Reads reads(rng, n);
  {
    const std::unique_ptr<ReadEngine> engine = uring_engine(file.descriptor, depth, told.done());
    PI2_CHECK(engine != nullptr && engine->name() == std::string("io_uring"), "depth %d", depth);
    if (engine == nullptr) return 1;
    std::vector<std::thread> threads;
    for (int t = 0; t < submitters; ++t)
      threads.emplace_back([&, t] {
        const int first = n * t / submitters, last = n * (t + 1) / submitters;
        engine->submit(&reads.reads[static_cast<std::size_t>(first)], last - first);
      });
    for (std::thread& thread : threads) thread.join();
    // Closing waits for all of them.
  }
  PI2_CHECK(told.count == n, "%d of %d", told.count, n);
  reads.check(file, told);
  return n;
}

#if defined(PI2_HAVE_URING)
// Each of its calls forbidden: refused, by name and with the reason.
long check_refused(const File& file) {
  const struct {
    const char* name;
    long number;
  } calls[] = {{"io_uring_setup", __NR_io_uring_setup},
               {"io_uring_register", __NR_io_uring_register},
               {"io_uring_enter", __NR_io_uring_enter}};
  long cases = 0;
  for (const auto& call : calls)
    for (const int error : {EPERM, ENOSYS, EACCES, ENOMEM}) {
      const int said = pi2_test::in_a_child([&] {
        if (!pi2_test::refuse(call.number, error)) return 2;
        std::string why;
        Told told(1);
        const bool refused = uring_engine(file.descriptor, 4, told.done(), &why) == nullptr;
        const std::string wanted = std::string("the kernel refuses ") + call.name + ": " + std::strerror(error);
        PI2_CHECK(refused && why == wanted, "expected '%s', found '%s'", wanted.c_str(), why.c_str());
        return pi2_test::failures() == 0 ? 0 : 1;
      });
      if (said == 2) return std::printf("no filters of system calls here: refusals are not tested\n") > 0 ? cases : 0;
      PI2_CHECK(said == 0, "%s, errno %d: %d", call.name, error, said);
      ++cases;
    }
  return cases;
}

// Forbidden behind its back, with reads under way: all are there, by other means.
long check_closed_behind(std::mt19937& rng, const File& file) {
  const int said = pi2_test::in_a_child([&] {
    constexpr int kBefore = 40, kAll = 100;
    Told told(kAll);
    Reads reads(rng, kAll);
    {
      const std::unique_ptr<ReadEngine> engine = uring_engine(file.descriptor, 8, told.done());
      if (engine == nullptr) return 1;
      engine->submit(reads.reads.data(), kBefore);
      if (!pi2_test::refuse(__NR_io_uring_enter, EPERM)) return 2;
      engine->submit(reads.reads.data() + kBefore, kAll - kBefore);
      told.wait(kAll);
    }
    reads.check(file, told);
    return pi2_test::failures() == 0 ? 0 : 1;
  });
  PI2_CHECK(said == 0 || said == 2, "%d", said);
  return said == 0;
}
#endif

}  // namespace

int main() {
  std::mt19937 rng(3);
  const File file(rng);
  long cases = 1;
  std::string why;
  Told told(1);
  const bool there = uring_engine(file.descriptor, 4, told.done(), &why) != nullptr;
  std::printf("io_uring: %s\n", there ? "this kernel has it" : why.c_str());
  PI2_CHECK(there == why.empty(), "'%s'", why.c_str());
  PI2_CHECK(uring_engine(file.descriptor, 1 << 20, told.done(), &why) == nullptr && !why.empty(),
            "deeper than a kernel");
#if defined(PI2_HAVE_URING)
  if (there) cases += check_refused(file) + check_closed_behind(rng, file);
#endif
  if (there)
    for (const int depth : {1, 3, 16, 64})
      for (const int submitters : {1, 4}) cases += check_reads(rng, file, depth, submitters, 300);
  return pi2_test::finish("test_uring", cases);
}
