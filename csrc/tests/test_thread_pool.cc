// The core's own threads: every index once, calls from inside and from several threads, and no work when there is none.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "pi2/thread_pool.h"
#include "tests/check.h"

namespace {

using pi2::ThreadPool;
using namespace pi2_test;

struct Marks {
  explicit Marks(std::int64_t n) : count(static_cast<std::size_t>(n)) {}
  std::vector<std::atomic<int>> count;
  static void mark(void* self, std::int64_t i) { static_cast<Marks*>(self)->count[static_cast<std::size_t>(i)]++; }
  bool all(int wanted) const {
    for (const auto& c : count)
      if (c.load() != wanted) return false;
    return true;
  }
};

long every_index_once() {
  long cases = 0;
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    PI2_CHECK(pool.threads() == threads && pool.parallel().threads == threads, "%d threads", pool.threads());
    for (const std::int64_t n : {0, 1, 2, 3, 100, 4096}) {
      Marks marks(n);
      pool.run(n, &Marks::mark, &marks);
      const pi2::ParallelFor parallel = pool.parallel();
      parallel.run(parallel.host, n, &Marks::mark, &marks);
      PI2_CHECK(marks.all(2), "%d threads, n %ld", threads, static_cast<long>(n));
      ++cases;
    }
  }
  return cases;
}

// Jobs follow each other at once, and after pauses in which the workers fell asleep.
long many_jobs() {
  ThreadPool pool(3);
  Marks marks(7);
  for (int i = 0; i < 5000; ++i) pool.run(7, &Marks::mark, &marks);
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    pool.run(7, &Marks::mark, &marks);
  }
  PI2_CHECK(marks.all(5020), "found %d", marks.count[0].load());
  return 1;
}

// What a body throws on any thread reaches whoever called, and the next job is done.
long bodies_that_throw() {
  long cases = 0;
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (const std::int64_t which : {0, 1, 50, 99}) {
      struct Job {
        Marks marks{100};
        std::int64_t which;
      } job{Marks(100), which};
      std::string found;
      try {
        pool.run(
            100,
            [](void* self, std::int64_t i) {
              Job& its = *static_cast<Job*>(self);
              if (i == its.which) throw std::runtime_error("index " + std::to_string(i));
              Marks::mark(&its.marks, i);
            },
            &job);
      } catch (const std::runtime_error& error) {
        found = error.what();
      }
      PI2_CHECK(found == "index " + std::to_string(which), "%d threads: '%s'", threads, found.c_str());
      Marks after(100);
      pool.run(100, &Marks::mark, &after);
      PI2_CHECK(after.all(1), "the next job");
      ++cases;
    }
  }
  return cases;
}

long nested_calls() {
  struct Both {
    ThreadPool pool{3};
    Marks marks{10};
    std::atomic<int> elsewhere{0};
  } both;
  both.pool.run(
      6,
      [](void* self, std::int64_t) {
        auto* b = static_cast<Both*>(self);
        struct Here {
          Both* both;
          std::thread::id thread;
        } here{b, std::this_thread::get_id()};
        b->pool.run(
            10,
            [](void* h, std::int64_t i) {
              auto* where = static_cast<Here*>(h);
              if (std::this_thread::get_id() != where->thread) where->both->elsewhere++;
              Marks::mark(&where->both->marks, i);
            },
            &here);
      },
      &both);
  PI2_CHECK(both.marks.all(6), "found %d", both.marks.count[0].load());
  PI2_CHECK(both.elsewhere == 0, "%d calls left their thread", both.elsewhere.load());
  return 1;
}

// Also where the inner call is to another pool, which has threads to spare; and a job of one index is none: what its
// body calls has the whole pool.
long nested_pools() {
  struct Both {
    ThreadPool outer{2}, inner{2};
    std::atomic<int> elsewhere{0}, met{0};
    std::atomic<bool> late{false};
  } both;
  both.outer.run(
      4,
      [](void* self, std::int64_t) {
        auto* b = static_cast<Both*>(self);
        struct Here {
          Both* both;
          std::thread::id thread;
        } here{b, std::this_thread::get_id()};
        b->inner.run(
            50,
            [](void* h, std::int64_t) {
              auto* where = static_cast<Here*>(h);
              if (std::this_thread::get_id() != where->thread) where->both->elsewhere++;
            },
            &here);
      },
      &both);
  PI2_CHECK(both.elsewhere == 0, "%d calls left their thread", both.elsewhere.load());
  both.outer.run(
      1,
      [](void* self, std::int64_t) {
        auto* b = static_cast<Both*>(self);
        b->outer.run(
            2,
            [](void* s, std::int64_t) {  // neither returns before both are here
              auto* m = static_cast<Both*>(s);
              m->met++;
              const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
              while (m->met < 2 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
              if (m->met < 2) m->late = true;
            },
            b);
      },
      &both);
  PI2_CHECK(!both.late, "a call from a job of one index had one thread");
  return 2;
}

long several_callers() {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        Marks marks(9);
        pool.run(9, &Marks::mark, &marks);
        if (!marks.all(1)) wrong++;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  PI2_CHECK(wrong == 0, "%d jobs were not done as they should", wrong.load());
  return 1;
}

// The caller's own work is not enough: a second thread must take part.
long threads_take_part() {
  struct Meeting {
    std::atomic<int> arrived{0};
    std::atomic<bool> late{false};
  } meeting;
  ThreadPool pool(2);
  pool.run(
      2,
      [](void* self, std::int64_t) {
        auto* m = static_cast<Meeting*>(self);
        m->arrived++;
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (m->arrived < 2 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        if (m->arrived < 2) m->late = true;
      },
      &meeting);
  PI2_CHECK(!meeting.late, "the second thread never came");
  return 1;
}

double cpu_seconds() {
  std::timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

long idle_costs_nothing() {
  ThreadPool pool(4);
  Marks marks(64);
  pool.run(64, &Marks::mark, &marks);
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const double spent = cpu_seconds() - before;
  PI2_CHECK(spent < 0.03, "%.0f ms of processor time in 300 ms of doing nothing", spent * 1e3);
  return 1;
}

}  // namespace

int main() {
  const long cases = every_index_once() + many_jobs() + bodies_that_throw() + nested_calls() + nested_pools() +
                     several_callers() + threads_take_part() + idle_costs_nothing();
  return finish("test_thread_pool", cases);
}
