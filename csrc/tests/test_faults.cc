// Faults of the device and of the file, at every read in turn: each gives an error that says where and why, or nothing
// if it can be made good; nothing hangs; and the next call computes the right bits. pread and preadv are this program's
// own; what io_uring reads goes wrong by exchanging the file below its descriptor.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "pi2/offload.h"
#include "pi2/thread_pool.h"
#include "tests/faulty_store.h"

namespace {

enum class Fault { kNone, kInterrupted, kError, kShort, kEnd };

// Which reads go wrong: `count` of them from number `first` on (the first is 1), or every `period`-th.
struct Injection {
  std::atomic<Fault> fault{Fault::kNone};
  std::atomic<int> error{EIO};
  std::atomic<long> first{0}, count{0}, period{0};
  std::atomic<bool> late{false};  // what does not fail takes up to two milliseconds more
  std::atomic<long> unit{1};      // short reads of a direct descriptor end on a sector
  std::atomic<long> reads{0}, injected{0};

  void arm(Fault what, long from, long how_many, int number = EIO) {
    first = from;
    count = how_many;
    error = number;
    period = reads = injected = 0;
    fault = what;
  }

  // The fault of the read that begins now.
  Fault next() {
    const long number = reads.fetch_add(1) + 1, every = period.load(), from = first.load();
    const bool hit = every > 0 ? number % every == 0 : number >= from && number - from < count.load();
    if (!hit && late) std::this_thread::sleep_for(std::chrono::microseconds(number % 8 * 250));
    if (!hit || fault.load() == Fault::kNone) return Fault::kNone;
    ++injected;
    return fault.load();
  }
};

Injection& injection() {
  static Injection one;
  return one;
}

// What a read of `bytes` comes to: -1 and errno, or how many of them are really read.
ssize_t allowed(std::size_t bytes) {
  Injection& in = injection();
  const auto unit = static_cast<std::size_t>(in.unit.load());
  switch (in.next()) {
    case Fault::kNone: break;
    case Fault::kInterrupted: errno = EINTR; return -1;
    case Fault::kError: errno = in.error; return -1;
    case Fault::kShort: return static_cast<ssize_t>(std::min(bytes, std::max(unit, bytes / 2 / unit * unit)));
    case Fault::kEnd: return 0;
  }
  return static_cast<ssize_t>(bytes);
}

}  // namespace

// Before the C library's: the core, a shared library, finds these.
extern "C" ssize_t pread(int descriptor, void* into, std::size_t bytes, off_t offset) {
  const ssize_t some = allowed(bytes);
  return some <= 0 ? some : syscall(SYS_pread64, descriptor, into, static_cast<std::size_t>(some), offset);
}

extern "C" ssize_t preadv(int descriptor, const struct iovec* parts, int count, off_t offset) {
  std::vector<struct iovec> some(parts, parts + count);
  std::size_t bytes = 0;
  for (const struct iovec& part : some) bytes += part.iov_len;
  const ssize_t most = allowed(bytes);
  if (most <= 0) return most;
  auto left = static_cast<std::size_t>(most);
  for (struct iovec& part : some) {
    part.iov_len = std::min(part.iov_len, left);
    left -= part.iov_len;
  }
  return syscall(SYS_preadv, descriptor, some.data(), count, offset, 0L);
}

namespace {

using namespace pi2;
using namespace pi2_test;

constexpr std::int64_t kNeuron = 3 * row_bytes(DType::kQ4, kHidden);

std::unique_ptr<Offload> open_store(const StoreFixture& store, const OffloadOptions& options) {
  std::unique_ptr<Offload> offload = opened(store, options);
  injection().unit = offload != nullptr && offload->describe().find("direct") != std::string::npos ? 512 : 1;
  return offload;
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// A failed call names layer, neuron, place and reason.
void check_message(const std::string& found, const StoreFixture& store, std::int64_t layer, const std::string& reason) {
  long said = -1, neuron = -1;
  const bool parsed = std::sscanf(found.c_str(), "layer %ld, neuron %ld", &said, &neuron) == 2;
  PI2_CHECK(parsed && (said == layer || layer < 0) && said >= 0 && said < 2 && neuron >= 0 && neuron < kNeurons,
            "found '%s'", found.c_str());
  if (!parsed || said < 0 || said > 1) return;
  const StoreLayer& l = store.layers[static_cast<std::size_t>(said)];
  PI2_CHECK(found.find(" at " + std::to_string(l.slots + neuron * l.slot_bytes) + ": ") != std::string::npos &&
                ends_with(found, ": " + reason),
            "found '%s', wanted %s", found.c_str(), reason.c_str());
}

void check_stats(const OffloadStats& s, std::int64_t calls) {
  PI2_CHECK(s.calls == calls, "%ld calls of %ld", static_cast<long>(s.calls), static_cast<long>(calls));
  PI2_CHECK(s.hits >= 0 && s.hits <= s.wanted && s.resident >= 0 && s.resident <= s.slots && s.evictions >= 0 &&
                s.uncached >= 0 && s.uncached <= s.wanted - s.hits && s.bytes_read >= kNeuron * s.reads,
            "%ld wanted, %ld hits, %ld of %ld resident, %ld uncached, %ld bytes in %ld reads",
            static_cast<long>(s.wanted), static_cast<long>(s.hits), static_cast<long>(s.resident),
            static_cast<long>(s.slots), static_cast<long>(s.uncached), static_cast<long>(s.bytes_read),
            static_cast<long>(s.reads));
  PI2_CHECK(s.wait_ns >= 0 && s.wait_ns <= s.busy_ns && s.io_ns >= 0, "times");
}

// After a fault: the right bits, and with a cache that holds everything nothing is missing and nothing is there that
// never came.
void check_recovered(Offload* offload, Work* work, const ParallelFor& parallel, bool whole) {
  injection().arm(Fault::kNone, 0, 0);
  for (int i = 0; i < 2; ++i) {
    offload->stats(true);
    const std::string wrong = work->run(offload, parallel);
    PI2_CHECK(wrong.empty() && work->same(), "after a fault: '%s'", wrong.c_str());
    const OffloadStats stats = offload->stats(false);
    check_stats(stats, 1);
    // A stream reads ahead for the next layer.
    if (i == 1 && whole)
      PI2_CHECK(stats.hits == stats.wanted && (stats.bytes_read == 0 || work->tokens > 3), "read again");
  }
}

struct Kind {
  Fault fault;
  long count;  // reads in a row; the rest of them where it is huge
  int error;
  const char* reason;  // null: it is made good
};

const Kind kKinds[] = {
    {Fault::kInterrupted, 3, EINTR, nullptr},
    {Fault::kShort, 1, 0, nullptr},
    {Fault::kShort, kAll, 0, nullptr},
    {Fault::kError, 1, EIO, "Input/output error"},
    {Fault::kError, kAll, EIO, "Input/output error"},
    {Fault::kError, 1, ENOMEM, "Cannot allocate memory"},
    {Fault::kEnd, 1, 0, "Input/output error"},
};

std::vector<OffloadOptions> settings() {
  std::vector<OffloadOptions> all;
  for (int i = 0; i < 6; ++i) {
    OffloadOptions options;
    options.engine = "pread";
    options.cache_bytes = i % 3 == 0 ? 0 : i % 3 == 1 ? 30 * 192 : 1 << 20;
    options.io_threads = i < 3 ? 1 : 4;
    options.pipeline = i % 2 == 0;
    options.direct = i % 2 == 1;
    options.in_flight = 1 + i % 4;
    options.run_bytes = i == 4 ? 1 : 4096;
    options.gap_bytes = i == 3 ? 1024 : 0;
    options.policy = i == 5 ? "sieve" : "lru";
    all.push_back(options);
  }
  return all;
}

// Numbers 1 to `reads`, about `most` of them.
std::vector<long> moments(long reads, long most = 12) {
  std::vector<long> all;
  for (long n = 1; n <= reads; n += std::max(1L, reads / most)) all.push_back(n);
  return all;
}

long check_calls(std::mt19937& rng) {
  const StoreFixture store = store_of(rng);
  std::vector<Work> works;
  works.emplace_back(rng, store, 1, 1);
  works.emplace_back(rng, store, 0, 3);
  works.emplace_back(rng, store, 1, 40);        // streamed
  works.emplace_back(rng, store, 0, 20, true);  // streamed by matrix products
  ThreadPool pool(2);
  long cases = 0;
  for (const OffloadOptions& options : settings()) {
    for (Work& work : works) {
      injection().arm(Fault::kNone, 0, 0);
      const std::unique_ptr<Offload> sound = open_store(store, options);
      injection().reads = 0;
      PI2_CHECK(work.run(sound.get(), pool.parallel()).empty() && work.same(), "without a fault");
      const long reads = injection().reads;
      PI2_CHECK(reads > 0, "no read was seen");
      for (const Kind& kind : kKinds) {
        long injected = 0, failed = 0;
        for (const long n : moments(reads, work.tokens > 3 ? 4 : 12)) {
          const std::unique_ptr<Offload> offload = open_store(store, options);
          injection().arm(kind.fault, n, kind.count, kind.error);
          const std::string found = work.run(offload.get(), pool.parallel());
          injected += injection().injected;
          // One read that fails may be read again, as any other that did not give every byte; and a stream reads ahead
          // for a layer that is not called.
          const bool again = (kind.count == 1 || work.tokens > 3) && found.empty();
          failed += !found.empty();
          if (kind.reason == nullptr || injection().injected == 0 || again)
            PI2_CHECK(found.empty() && work.same(), "read %ld: '%s'", n, found.c_str());
          else
            check_message(found, store, work.layer, kind.reason);
          check_stats(offload->stats(false), 1);
          check_recovered(offload.get(), &work, pool.parallel(), options.cache_bytes == 1 << 20);
          ++cases;
        }
        PI2_CHECK(injected > 0, "no fault in %ld reads", reads);
        PI2_CHECK((failed > 0) == (kind.reason != nullptr && (kind.count > 1 || failed > 0)), "nothing failed");
      }
    }
  }
  return cases;
}

// Guesses that cannot be read, while another layer is computed and then their own: an error at most where they are
// wanted while they are on their way.
long check_guesses(std::mt19937& rng) {
  const StoreFixture store = store_of(rng);
  Work first(rng, store, 0, 1), of_one(rng, store, 1, 1), of_many(rng, store, 1, 40);
  ThreadPool pool(2);
  long cases = 0;
  for (std::size_t i = 0; i < 2 * settings().size(); ++i) {
    const OffloadOptions options = settings()[i / 2];
    Work& second = i % 2 == 0 ? of_one : of_many;
    if (options.cache_bytes == 0) continue;
    for (const Kind& kind : kKinds) {
      injection().arm(Fault::kNone, 0, 0);
      const std::unique_ptr<Offload> offload = open_store(store, options);
      PI2_CHECK(first.run(offload.get(), pool.parallel()).empty(), "before");
      offload->stats(true);
      long failed = 0;
      for (int round = 0; round < 6; ++round) {
        injection().arm(kind.fault, 1 + round, kind.count, kind.error);
        offload->prefetch(1, 0, second.active.data(), 1);
        for (Work* work : {&first, &second, &first}) {
          const std::string found = work->run(offload.get(), pool.parallel());
          failed += !found.empty();
          if (found.empty())
            PI2_CHECK(work->same(), "wrong bits");
          else if (kind.reason != nullptr)
            check_message(found, store, work->layer, kind.reason);
          else
            PI2_CHECK(false, "'%s'", found.c_str());
        }
        ++cases;
      }
      PI2_CHECK(failed > 0 || kind.reason == nullptr || kind.count == 1, "nothing failed");
      check_stats(offload->stats(false), 18);
      for (Work* work : {&second, &first})
        check_recovered(offload.get(), work, pool.parallel(), options.cache_bytes == 1 << 20);
    }
  }
  return cases;
}

long check_preload(std::mt19937& rng) {
  const StoreFixture store = store_of(rng);
  Work work(rng, store, 0, 1);
  OffloadOptions options;
  long cases = 0;
  for (const std::int64_t bytes : {30 * 192, 1 << 20}) {
    options.cache_bytes = bytes;
    injection().arm(Fault::kNone, 0, 0);
    const std::unique_ptr<Offload> sound = open_store(store, options);
    injection().reads = 0;
    PI2_CHECK(sound->preload().empty(), "without a fault");
    const long reads = injection().reads;
    for (const Kind& kind : kKinds) {
      for (const long n : moments(reads)) {
        const std::unique_ptr<Offload> offload = open_store(store, options);
        injection().arm(kind.fault, n, kind.count, kind.error);
        const std::string found = offload->preload();
        PI2_CHECK(injection().injected > 0, "no fault at %ld of %ld reads", n, reads);
        if (kind.reason == nullptr)
          PI2_CHECK(found.empty(), "'%s'", found.c_str());
        else
          check_message(found, store, -1, kind.reason);
        PI2_CHECK((offload->stats(false).resident == 0) == (kind.reason != nullptr), "what is there");
        injection().arm(Fault::kNone, 0, 0);
        PI2_CHECK(offload->preload().empty() && offload->stats(true).resident > 0, "the next one");
        PI2_CHECK(work.run(offload.get(), serial()).empty() && work.same(), "bits");
        PI2_CHECK(offload->stats(false).hits > 0, "nothing was preloaded");
        ++cases;
      }
    }
  }
  return cases;
}

// What arrange() cannot read is not there, and nothing worse: no call fails of it, what it is asked for is read again,
// and then stays.
long check_arranging(std::mt19937& rng) {
  const StoreFixture store = store_of(rng);
  Work first(rng, store, 0, 1), second(rng, store, 1, 3), prompt(rng, store, 1, 40);  // the last is streamed
  ThreadPool pool(2);
  const auto wait = [](Offload* offload) {
    while (offload->stats(false).arranging > 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  };
  long cases = 0;
  for (const OffloadOptions& options : settings()) {
    if (options.cache_bytes == 0) continue;
    const bool whole = options.cache_bytes == 1 << 20;
    for (const Kind& kind : kKinds) {
      for (const long n : {1L, 2L, 5L}) {
        injection().arm(Fault::kNone, 0, 0);
        const std::unique_ptr<Offload> offload = open_store(store, options);
        injection().arm(kind.fault, n, kind.count, kind.error);
        PI2_CHECK(offload->arrange({kNeurons, kNeurons}).empty(), "arrange");
        wait(offload.get());
        const OffloadStats stats = offload->stats(true);
        PI2_CHECK(n > 1 || injection().injected > 0, "no fault");
        const std::int64_t wanted = std::min<std::int64_t>(stats.slots, 2 * kNeurons);
        PI2_CHECK(stats.fixed == stats.resident && stats.fixed <= wanted, "%ld fixed of %ld",
                  static_cast<long>(stats.fixed), static_cast<long>(wanted));
        if (kind.reason == nullptr || injection().injected == 0)
          PI2_CHECK(stats.fixed == wanted, "%ld fixed of %ld", static_cast<long>(stats.fixed),
                    static_cast<long>(wanted));
        else
          // One read that fails may be read again.
          PI2_CHECK(kind.count == 1 || (stats.fixed < wanted && (n > 1 || stats.fixed == 0)), "what failed is there");
        injection().arm(Fault::kNone, 0, 0);
        for (Work* work : {&first, &second}) check_recovered(offload.get(), work, pool.parallel(), whole);
        const OffloadStats then = offload->stats(true);
        PI2_CHECK(then.fixed >= stats.fixed && (!whole || then.fixed == then.resident), "what is read again stays");
        // Again, with calls that fail or not meanwhile.
        injection().arm(kind.fault, n, kind.count, kind.error);
        PI2_CHECK(offload->arrange({kNeurons / 2, kNeurons}).empty() && offload->arrange({kNeurons, 3}).empty(),
                  "arrange");
        for (Work* work : {&prompt, &first, &second, &prompt, &first}) {
          const std::string found = work->run(offload.get(), pool.parallel());
          if (found.empty())
            PI2_CHECK(work->same(), "wrong bits");
          else if (kind.reason != nullptr)
            check_message(found, store, work->layer, kind.reason);
          else
            PI2_CHECK(false, "'%s'", found.c_str());
        }
        wait(offload.get());
        for (Work* work : {&first, &second, &prompt}) check_recovered(offload.get(), work, pool.parallel(), whole);
        ++cases;
      }
    }
  }
  return cases;
}

// While opening: refused with the reason, or opened (a failed trial of direct reads means the page cache).
long check_opening(std::mt19937& rng) {
  const StoreFixture store = store_of(rng);
  Work work(rng, store, 1, 1);
  OffloadOptions options;
  injection().arm(Fault::kNone, 0, 0);
  open_store(store, options);
  const long reads = injection().reads;
  PI2_CHECK(reads >= 5, "%ld reads", reads);
  long cases = 0, refused = 0;
  for (const Kind& kind : kKinds) {
    for (long n = 1; n <= reads; ++n) {
      injection().unit = 512;
      injection().arm(kind.fault, n, kind.count, kind.error);
      std::string problem;
      std::unique_ptr<Offload> offload = Offload::open(store.path, options, &problem);
      PI2_CHECK(injection().injected > 0, "no fault");
      PI2_CHECK((offload == nullptr) == !problem.empty(), "'%s'", problem.c_str());
      PI2_CHECK(offload != nullptr || (kind.reason != nullptr && ends_with(problem, kind.reason)), "read %ld: '%s'", n,
                problem.c_str());
      refused += offload == nullptr;
      injection().arm(Fault::kNone, 0, 0);
      if (offload == nullptr) offload = open_store(store, options);
      check_recovered(offload.get(), &work, serial(), false);
      ++cases;
    }
  }
  PI2_CHECK(refused >= 4 * 5, "%ld refused", refused);  // of each kind that is not made good: all but the trial
  return cases;
}

// Four threads on one store of which every eleventh read fails: what they get is right or says that it is not.
long check_company(std::mt19937& rng) {
  const StoreFixture store = store_of(rng);
  for (const OffloadOptions& options : settings()) {
    injection().arm(Fault::kNone, 0, 0);
    const std::unique_ptr<Offload> offload = open_store(store, options);
    std::vector<Work> works;
    for (int i = 0; i < 4; ++i) works.emplace_back(rng, store, i % 2, i < 2 ? 1 : 2 + 38 * (i % 2));
    std::vector<std::thread> threads;
    std::atomic<long> failed{0};
    injection().arm(Fault::kError, 0, 0);
    injection().period = 11;
    for (Work& work : works) {
      threads.emplace_back([&offload, &store, &failed, &work] {
        for (int round = 0; round < 10; ++round) {
          const std::string found = work.run(offload.get(), serial());
          failed += !found.empty();
          if (found.empty())
            PI2_CHECK(work.same(), "wrong bits");
          else
            check_message(found, store, work.layer, "Input/output error");
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    PI2_CHECK(failed > 0, "nothing failed");
    check_stats(offload->stats(true), 40);
    for (Work& work : works) check_recovered(offload.get(), &work, serial(), options.cache_bytes == 1 << 20);
  }
  return 240;
}

// Reads of a call that has failed come late: they must not write into what the next call reads.
long check_late(std::mt19937& rng) {
  const StoreFixture store = store_of(rng);
  Work first(rng, store, 0, 1), second(rng, store, 1, 1);
  long cases = 0;
  for (OffloadOptions options : settings()) {
    options.io_threads = 64;  // so that all of them have begun
    injection().arm(Fault::kNone, 0, 0);
    const std::unique_ptr<Offload> offload = open_store(store, options);
    for (int round = 0; round < 5; ++round, ++cases) {
      injection().late = true;
      injection().arm(Fault::kError, 1 + round, 1);
      const std::string found = first.run(offload.get(), serial());
      if (!found.empty()) check_message(found, store, 0, "Input/output error");
      injection().arm(Fault::kNone, 0, 0);
      const std::string wrong = second.run(offload.get(), serial());
      PI2_CHECK(wrong.empty() && second.same(), "after a failure: '%s'", wrong.c_str());
      injection().late = false;
    }
  }
  return cases;
}

// The open descriptors of a file.
std::vector<int> descriptors_of(const std::string& path) {
  std::vector<int> found;
  DIR* all = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(all)) {
    char target[4096];
    const std::string link = std::string("/proc/self/fd/") + entry->d_name;
    const ssize_t length = readlink(link.c_str(), target, sizeof(target));
    if (length > 0 && std::string(target, static_cast<std::size_t>(length)) == path)
      found.push_back(std::atoi(entry->d_name));
  }
  closedir(all);
  return found;
}

// Every engine over a descriptor that cannot be read, a file that has become shorter, and another store of the same
// shape; then over the right file again.
long check_descriptors(std::mt19937& rng) {
  const StoreFixture store = store_of(rng), foreign = store_of(rng);
  Work work(rng, store, 1, 1);
  ThreadPool pool(2);
  long cases = 0;
  injection().arm(Fault::kNone, 0, 0);
  for (const char* engine : {"pread", "io_uring"}) {
    for (int i = 0; i < 8; ++i) {
      OffloadOptions options;
      options.engine = engine;
      options.cache_bytes = i % 2 == 0 ? 0 : 1 << 20;
      options.pipeline = i % 4 < 2;
      options.direct = i < 4;
      options.io_threads = 1 + i;
      const std::unique_ptr<Offload> offload = open_store(store, options);
      if (offload == nullptr) continue;
      const std::vector<int> own = descriptors_of(store.path);
      PI2_CHECK(!own.empty(), "no descriptor");
      struct Instead {
        std::string path;
        int flags;
        const char* reason;
      };
      const std::string cut = store.path + ".cut";
      const int half = open(cut.c_str(), O_RDWR | O_CREAT, 0600);
      const std::int64_t there = store.layers[1].slots + 10 * store.layers[1].slot_bytes + 100;
      PI2_CHECK(write(half, store.file.data(), static_cast<std::size_t>(there)) == there, "write");
      const Instead all[] = {{store.path, O_WRONLY, "Bad file descriptor"},
                             {cut, O_RDONLY, "Input/output error"},
                             {foreign.path, O_RDONLY, "its checksum does not match"}};
      for (const Instead& instead : all) {
        std::vector<int> kept;
        const int other = open(instead.path.c_str(), instead.flags);
        for (const int d : own) {
          kept.push_back(dup(d));
          PI2_CHECK(dup2(other, d) == d, "dup2");
        }
        offload->stats(true);
        for (int k = 0; k < 2; ++k) check_message(work.run(offload.get(), pool.parallel()), store, 1, instead.reason);
        for (std::size_t d = 0; d < own.size(); ++d) {
          PI2_CHECK(dup2(kept[d], own[d]) == own[d], "dup2");
          close(kept[d]);
        }
        close(other);
        check_stats(offload->stats(true), 2);
        Work elsewhere(rng, store, 0, 2);
        check_recovered(offload.get(), &elsewhere, pool.parallel(), options.cache_bytes > 0);
        ++cases;
      }
      check_recovered(offload.get(), &work, pool.parallel(), options.cache_bytes > 0);
      close(half);
      unlink(cut.c_str());
    }
  }
  return cases;
}

// Bytes that are not those packed: whichever neuron they are in is named, and when they are as before all is well.
long check_damage(std::mt19937& rng) {
  StoreFixture store = store_of(rng);
  const std::vector<char> whole = store.file;
  const std::int64_t slot = store.layers[0].slot_bytes, neuron = store.layers[0].neuron_bytes();
  Work work(rng, store, 0, 1);
  const auto at = [&](std::int64_t layer, std::int64_t neuron) {
    return store.file.begin() + store.layers[static_cast<std::size_t>(layer)].slots + neuron * slot;
  };
  long cases = 0;
  injection().arm(Fault::kNone, 0, 0);
  for (const char* engine : {"pread", "io_uring"}) {
    for (int i = 0; i < 60; ++i) {
      OffloadOptions options;
      options.engine = engine;
      options.cache_bytes = i % 2 == 0 ? 0 : 1 << 20;
      const std::unique_ptr<Offload> offload = open_store(store, options);
      if (offload == nullptr) continue;
      const std::int64_t a = static_cast<std::int64_t>(rng() % 20),
                         b = (a + 1 + static_cast<std::int64_t>(rng() % 19)) % 20;
      switch (i % 6) {
        case 0: *(at(0, a) + static_cast<std::int64_t>(rng() % neuron)) ^= static_cast<char>(1 << rng() % 8); break;
        case 1: std::swap_ranges(at(0, a), at(0, a) + slot, at(0, b)); break;             // two neurons
        case 2: std::swap_ranges(at(0, 0), at(0, 0) + kNeurons * slot, at(1, 0)); break;  // two layers
        case 3: std::copy(at(0, b), at(0, b) + slot, at(0, a)); break;                    // one twice
        case 4: std::fill(at(0, a), at(0, a) + 4096, static_cast<char>(0)); break;        // a lost page
        default: std::copy(at(0, a) + 512, at(0, a) + 512 * 9, at(0, a)); break;          // slipped by a sector
      }
      store.write();
      for (int k = 0; k < 2; ++k)
        check_message(work.run(offload.get(), serial()), store, 0, "its checksum does not match");
      if (options.cache_bytes > 0) check_message(offload->preload(), store, -1, "its checksum does not match");
      store.file = whole;
      store.write();
      check_recovered(offload.get(), &work, serial(), options.cache_bytes > 0);
      ++cases;
    }
  }
  return cases;
}

extern "C" void nothing(int) {}

// Signals without SA_RESTART to every thread, those of the engines among them, while it computes.
long check_signals(std::mt19937& rng) {
  const StoreFixture store = store_of(rng);
  Work work(rng, store, 1, 2);
  ThreadPool pool(2);
  struct sigaction action{};
  action.sa_handler = nothing;
  sigaction(SIGUSR1, &action, nullptr);
  long cases = 0;
  injection().arm(Fault::kNone, 0, 0);
  for (const char* engine : {"pread", "io_uring"}) {
    OffloadOptions options;
    options.engine = engine;
    options.io_threads = 2;
    const std::unique_ptr<Offload> offload = open_store(store, options);
    if (offload == nullptr) continue;
    std::atomic<bool> over{false};
    std::thread sender([&over] {
      while (!over) {
        DIR* tasks = opendir("/proc/self/task");
        while (const dirent* entry = readdir(tasks))
          if (entry->d_name[0] != '.') syscall(SYS_tgkill, getpid(), std::atoi(entry->d_name), SIGUSR1);
        closedir(tasks);
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    });
    for (int round = 0; round < 150; ++round, ++cases) {
      const std::string wrong = work.run(offload.get(), pool.parallel());
      PI2_CHECK(wrong.empty() && work.same(), "%s, round %d: '%s'", engine, round, wrong.c_str());
    }
    over = true;
    sender.join();
  }
  return cases;  // the handler stays: a thread that has not run since gets its last signal later
}

}  // namespace

int main() {
  alarm(600);  // nothing hangs
  std::mt19937 rng(11);
  long cases = check_calls(rng);
  cases += check_guesses(rng);
  cases += check_preload(rng);
  cases += check_arranging(rng);
  cases += check_opening(rng);
  cases += check_company(rng);
  cases += check_late(rng);
  cases += check_descriptors(rng);
  cases += check_damage(rng);
  cases += check_signals(rng);
  return finish("test_faults", cases);
}
