// Memory runs out at every allocation in turn, on whatever thread: the call that asked says so by name (or by
// std::bad_alloc, where it is the caller's own thread), nothing hangs, nothing ends the process, and the next call
// computes the right bits. operator new, pread and preadv are this program's own: the core, a shared library, finds
// them.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>

#include "pi2/offload.h"
#include "pi2/thread_pool.h"
#include "tests/faulty_store.h"

namespace {

// Which events of a kind fail: `count` of them from number `first` on (the first is 1).
struct Faults {
  std::atomic<long> first{0}, count{0}, seen{0}, hit{0};

  void arm(long from, long how_many) {
    first = from;
    seen = hit = 0;
    count = how_many;
  }
  void disarm() { count = 0; }
  bool next() {
    if (count.load(std::memory_order_relaxed) == 0) return false;
    const long number = seen.fetch_add(1) + 1, from = first.load();
    const bool hits = number >= from && number - from < count.load();
    hit += hits;
    return hits;
  }
};

// Constant-initialised: memory is asked for before main.
Faults allocations, reads, threads;
std::atomic<bool> io_only{false};  // allocations of this program's own threads do not count
thread_local bool is_ours = false;

void* memory(std::size_t bytes) {
  if ((!io_only || !is_ours) && allocations.next()) return nullptr;
  return std::malloc(bytes);
}

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* const at = memory(bytes);
  if (at == nullptr) throw std::bad_alloc();
  return at;
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes); }
[[gnu::noinline]] void operator delete(void* at) noexcept { std::free(at); }
[[gnu::noinline]] void operator delete(void* at, std::size_t) noexcept { std::free(at); }

extern "C" ssize_t pread(int descriptor, void* into, std::size_t bytes, off_t offset) {
  if (reads.next()) return errno = EIO, -1;
  return syscall(SYS_pread64, descriptor, into, bytes, offset);
}

extern "C" ssize_t preadv(int descriptor, const struct iovec* parts, int count, off_t offset) {
  if (reads.next()) return errno = EIO, -1;
  return syscall(SYS_preadv, descriptor, parts, count, offset, 0L);
}

// Threads that cannot be started.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* about, void* (*run)(void*), void* argument) {
  static const auto real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return threads.next() ? EAGAIN : real(thread, about, run, argument);
}

namespace {

using namespace pi2;
using namespace pi2_test;

std::vector<OffloadOptions> settings() {
  std::vector<OffloadOptions> all;
  for (int i = 0; i < 6; ++i) {
    OffloadOptions options;
    options.engine = i == 2 ? "io_uring" : "pread";
    options.cache_bytes = i % 3 == 0 ? 0 : i % 3 == 1 ? 30 * 192 : 1 << 20;
    options.io_threads = i < 3 ? 1 : 4;
    options.pipeline = i % 2 == 0;
    options.in_flight = 1 + i % 4;
    options.policy = i == 5 ? "sieve" : i == 4 ? "s3-fifo" : "lru";
    options.window = i == 3 ? 2 : 0;
    all.push_back(options);
  }
  return all;
}

// What `body` says while memory is short; "no memory" if it throws that there is none.
template <class Body>
std::string said(const Body& body) {
  std::string found;
  try {
    found = body();
  } catch (const std::bad_alloc&) {
    allocations.disarm();
    return "no memory";
  }
  allocations.disarm();
  return found;
}

void check_recovered(Offload* offload, Work* work, const ParallelFor& parallel) {
  for (int i = 0; i < 2; ++i) {
    const std::string wrong = work->run(offload, parallel);
    PI2_CHECK(wrong.empty() && work->same(), "after a fault: '%s'", wrong.c_str());
  }
}

// For every k until nothing fails any more: the k-th allocation alone, and all from the k-th on.
template <class Try>
long each(const Try& attempt) {
  long cases = 0;
  for (const long count : {1L, kAll}) {
    for (long k = 1;; k += count == 1 ? 1 : 3, ++cases) {
      attempt(k, count);
      if (allocations.hit == 0) break;
      PI2_CHECK(k < 5000, "no end");
      if (k >= 5000) break;
    }
  }
  return cases;
}

long check_calls(std::mt19937& rng) {
  const StoreFixture store = store_of(rng);
  std::vector<Work> works;
  works.emplace_back(rng, store, 1, 1);
  works.emplace_back(rng, store, 0, 3);
  works.emplace_back(rng, store, 0, 40);  // streamed: the next layer is read ahead
  works.emplace_back(rng, store, 1, 40);
  ThreadPool pool(2);
  long cases = 0;
  for (const OffloadOptions& options : settings()) {
    if (opened(store, options) == nullptr) continue;
    for (Work& work : works) {
      cases += each([&](long k, long count) {
        const std::unique_ptr<Offload> offload = opened(store, options);
        allocations.arm(k, count);
        const std::string found = said([&] { return work.run(offload.get(), pool.parallel()); });
        if (found.empty())
          PI2_CHECK(work.same(), "wrong bits");
        else
          PI2_CHECK(found == "no memory", "found '%s'", found.c_str());
        check_recovered(offload.get(), &works[0], pool.parallel());
        check_recovered(offload.get(), &work, pool.parallel());
      });
    }
  }
  return cases;
}

// A read fails while the threads that read have no memory at all: whoever waits is told of the read.
long check_messages(std::mt19937& rng) {
  StoreFixture store = store_of(rng);
  const std::vector<char> whole = store.file;
  Work work(rng, store, 1, 1), prompt(rng, store, 0, 40);
  long cases = 0;
  for (const OffloadOptions& options : settings()) {
    if (options.engine != "pread") continue;
    for (Work* each : {&work, &prompt}) {
      for (const long n : {1L, 2L, 5L}) {
        for (const bool damaged : {false, true}) {
          const std::unique_ptr<Offload> offload = opened(store, options);
          if (damaged) {
            const StoreLayer& l = store.layers[static_cast<std::size_t>(each->layer)];
            for (std::int64_t i = 0; i < kNeurons; ++i)
              store.file[static_cast<std::size_t>(l.slots + i * l.slot_bytes)] ^= 1;
            store.write();
          } else {
            reads.arm(n, kAll);
          }
          io_only = true;
          allocations.arm(1, kAll);
          const std::string found = said([&] { return each->run(offload.get(), serial()); });
          io_only = false;
          reads.disarm();
          if (!damaged && reads.hit == 0) continue;  // it has not as many reads
          const char* why = damaged ? ": its checksum does not match" : ": Input/output error";
          PI2_CHECK(found.rfind("layer " + std::to_string(each->layer) + ", neuron ", 0) == 0 &&
                        found.find(why) != std::string::npos,
                    "found '%s'", found.c_str());
          store.file = whole;
          store.write();
          check_recovered(offload.get(), each, serial());
          ++cases;
        }
      }
    }
  }
  return cases;
}

// While opening, filling, arranging, resizing and guessing.
long check_the_rest(std::mt19937& rng) {
  const StoreFixture store = store_of(rng);
  Work first(rng, store, 0, 1), second(rng, store, 1, 1);
  long cases = 0;
  const auto settled = [](Offload* offload) {
    while (offload->stats(false).arranging > 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  };
  for (const OffloadOptions& options : settings()) {
    if (opened(store, options) == nullptr) continue;
    cases += each([&](long k, long count) {
      std::unique_ptr<Offload> offload;
      std::string problem;
      allocations.arm(k, count);
      const std::string found = said([&] {
        offload = Offload::open(store.path, options, &problem);
        return problem;
      });
      const bool refused = offload == nullptr;
      PI2_CHECK(refused == !found.empty(), "'%s'", found.c_str());
      if (refused) offload = opened(store, options);
      check_recovered(offload.get(), &first, serial());
    });
    if (options.cache_bytes == 0) continue;
    for (int what = 0; what < 4; ++what) {
      cases += each([&](long k, long count) {
        const std::unique_ptr<Offload> offload = opened(store, options);
        check_recovered(offload.get(), &second, serial());
        allocations.arm(k, count);
        const std::string found = said([&]() -> std::string {
          if (what == 0) return offload->preload();
          if (what == 1) return offload->resize(options.cache_bytes / 2, 0.5);
          if (what == 2) offload->prefetch(0, kNeurons, nullptr, 1);
          if (what < 3) return "";
          const std::string wrong = offload->arrange({kNeurons / 2, kNeurons / 3});
          settled(offload.get());
          return wrong;
        });
        PI2_CHECK(found.empty() || found == "no memory" || found == "no thread could be started for reading", "'%s'",
                  found.c_str());
        settled(offload.get());
        check_recovered(offload.get(), &first, serial());
        check_recovered(offload.get(), &second, serial());
        PI2_CHECK(offload->preload().empty(), "preload");
        check_recovered(offload.get(), &first, serial());
      });
    }
  }
  return cases;
}

// Threads that cannot be started: the first so many can. Those that there are do, or the reason is named.
long check_threads(std::mt19937& rng) {
  const StoreFixture store = store_of(rng);
  Work work(rng, store, 1, 2);
  long cases = 0;
  for (long k = 1; k <= 6; ++k, ++cases) {
    threads.arm(k, kAll);
    ThreadPool pool(4);
    PI2_CHECK(pool.threads() == std::min(k, 4L), "%d threads", pool.threads());
    threads.arm(k, kAll);
    OffloadOptions options;
    options.io_threads = 4;
    std::string problem;
    std::unique_ptr<Offload> offload = Offload::open(store.path, options, &problem);
    PI2_CHECK(
        (offload != nullptr) == (k > 1) &&
            (problem == "engine: pread is not available here: no thread could be started for reading") == (k == 1),
        "%ld: '%s'", k, problem.c_str());
    threads.count = 0;
    if (offload == nullptr) offload = opened(store, options);
    threads.arm(1, kAll);
    PI2_CHECK(offload->arrange({5, 5}) == "no thread could be started for reading", "arrange");
    threads.count = 0;
    PI2_CHECK(offload->arrange({5, 5}).empty(), "arrange");
    check_recovered(offload.get(), &work, pool.parallel());
  }
  // No memory for the thread that is to be started.
  for (long k = 1; k <= 12; ++k, ++cases) {
    allocations.arm(k, 1);
    const std::string found = said([] {
      ThreadPool pool(4);
      return std::to_string(pool.threads());
    });
    PI2_CHECK(found == "no memory" || (found >= "1" && found <= "4"), "'%s'", found.c_str());
  }
  return cases;
}

}  // namespace

int main() {
  alarm(600);  // nothing hangs
  is_ours = true;
  std::mt19937 rng(11);
  long cases = check_messages(rng);
  cases += check_calls(rng);
  cases += check_the_rest(rng);
  cases += check_threads(rng);
  return finish("test_no_memory", cases);
}
