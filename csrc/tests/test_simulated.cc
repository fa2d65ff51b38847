// The flash simulator: the model of a device against figures by hand, in virtual time; and the engine that delays
// reads, in real time.
#include "io/simulated.h"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "pi2/offload.h"
#include "pi2/thread_pool.h"
#include "tests/store_fixture.h"

namespace {

using namespace pi2;

constexpr double kMB = 1e6;
constexpr std::int64_t kKiB = 1024, kMiB = 1024 * kKiB;

// Two blocks, two ranges and one depth of random reads; two blocks and two depths of sequential ones.
std::vector<double> numbers(double latency = 5e-6, double core = 0, double depth = 32) {
  return {latency, depth, core,  // random:
          2, 2, 1, 4096, 524288, 128.0 * kMiB, 512.0 * kMiB, 32, 1076.1 * kMB, 850 * kMB, 3500 * kMB, 3400 * kMB,
          // sequential:
          2, 1, 2, 4096, 524288, 1, 1, 32, 450 * kMB, 1100 * kMB, 3800 * kMB, 4000 * kMB};
}

DeviceModel device(const std::vector<double>& list, std::int64_t range = 128 * kMiB) {
  DeviceModel model;
  const std::string wrong = DeviceModel::parse(list, &model);
  PI2_CHECK(wrong.empty(), "%s", wrong.c_str());
  model.set_range(range);
  return model;
}

// MB/s of `n` reads in a closed loop.
double driven(const DeviceModel& model, std::int64_t block, std::int64_t depth, bool sequential, int n = 20000) {
  std::vector<std::int64_t> offsets, bytes;
  for (int i = 0; i < n; ++i) {
    offsets.push_back(sequential ? i * block : (i % 2 == 0 ? 10 + i : 5000 - i) * 4 * block);
    bytes.push_back(block);
  }
  const std::vector<double> ends = closed_loop(model, depth, offsets, bytes);
  return static_cast<double>(n) * static_cast<double>(block) / ends.back() / kMB;
}

bool near(double found, double wanted, double within = 0.01) { return std::abs(found / wanted - 1) <= within; }

long check_figures() {
  struct Case {
    std::int64_t block, range, depth;
    bool sequential;
    double wanted;
  };
  const double halfway = std::sqrt(1076.1 * 3500);  // of the logarithms: 4 KiB, 46.3 KiB, 512 KiB
  const Case cases[] = {
      {4096, 128 * kMiB, 32, false, 1076.1},
      {4096, 512 * kMiB, 32, false, 850},
      {524288, 128 * kMiB, 32, false, 3500},
      {524288, 512 * kMiB, 32, false, 3400},
      {4096, 256 * kMiB, 32, false, std::sqrt(1076.1 * 850)},
      {46341, 128 * kMiB, 32, false, halfway},
      {4096, 16 * kMiB, 32, false, 1076.1},      // a smaller range than any measured
      {4096, 9000 * kMiB, 32, false, 850},       // a larger one
      {2 * kMiB, 128 * kMiB, 32, false, 3500},   // a larger block
      {512, 128 * kMiB, 32, false, 1076.1 / 8},  // a smaller one takes as long as 4 KiB
      {4096, 128 * kMiB, 64, false, 1076.1},     // more than the device takes
      {4096, 512 * kMiB, 1, true, 450},
      {4096, 512 * kMiB, 32, true, 1100},
      {524288, 512 * kMiB, 1, true, 3800},
      {524288, 512 * kMiB, 32, true, 4000},
      // One at a time: the latency, and the 4 KiB at 1076.1 MB/s.
      {4096, 128 * kMiB, 1, false, 4096 / (5 + 4096 / 1076.1)},
      // Two: each is under way while the other waits, so that a turn of two takes a latency and one service time.
      {4096, 128 * kMiB, 2, false, 2 * 4096 / (5 + 4096 / 1076.1)},
      {4096, 128 * kMiB, 3, false, 1076.1},
  };
  for (const Case& c : cases) {
    const double found = driven(device(numbers(), c.range), c.block, c.depth, c.sequential);
    PI2_CHECK(near(found, c.wanted), "%ld bytes over %ld at depth %ld: %.1f MB/s, expected %.1f",
              static_cast<long>(c.block), static_cast<long>(c.range), static_cast<long>(c.depth), found, c.wanted);
  }
  // A device that gains from depth: what counts is the commands at the device, the new one among them.
  const std::vector<double> deep = {0, 16, 0, 1, 1, 3, 4096, 1, 1, 4, 16, 100 * kMB, 200 * kMB, 800 * kMB,  //
                                    1, 1,  1, 1, 1, 1, kMB};
  for (const auto& [depth, wanted] : {std::pair{1, 100.0}, {2, std::sqrt(100.0 * 200)}, {4, 200.0}, {8, 400.0}}) {
    const double found = driven(device(deep), 4096, depth, false);
    PI2_CHECK(near(found, wanted), "depth %d: %.1f MB/s, expected %.1f", depth, found, wanted);
  }
  // The core: what a command costs more, at any size.
  const double slower = driven(device(numbers(5e-6, 1.5e-6)), 4096, 32, false);
  PI2_CHECK(near(slower, 4096 / (4096 / 1076.1 + 1.5)), "%.1f MB/s", slower);
  return static_cast<long>(std::size(cases)) + 5;
}

// Every time of a few reads by hand: 10 us of latency, 4 us a read, 2 us a sequential one, two at the device.
long check_times() {
  DeviceModel model = device({10e-6, 2, 0, 1, 1, 1, 4000, 1, 1, 4000 / 14e-6, 1, 1, 1, 4000, 1, 1, 4000 / 12e-6});
  const struct {
    double now;
    std::int64_t offset;
    double end;
  } reads[] = {
      {0, 8000, 14},       // 10 and 4
      {0, 20000, 18},      // worked on when the first is over
      {0, 24000, 26},      // enters at 14 (two at the device), sequential: 24 and 2
      {1, 40000, 32},      // enters at 18: 28 and 4
      {100, 44000, 112},   // idle before: 10 and 2
      {111, 44000, 125},   // again: not sequential; the one before is still under way
      {200, 900000, 214},  // idle
  };
  for (const auto& r : reads) {
    const double end = model.finish(r.now * 1e-6, r.offset, 4000) * 1e6;
    PI2_CHECK(std::abs(end - r.end) < 1e-6, "at %g us: %.6f, expected %g", r.now, end, r.end);
  }
  return static_cast<long>(std::size(reads));
}

// More bytes never finish earlier: neither that read nor those after it; nor does asking later.
long check_monotone(std::mt19937& rng) {
  long cases = 0;
  for (int round = 0; round < 300; ++round, ++cases) {
    const DeviceModel model = device(numbers(rng() % 5 * 1e-6), (std::int64_t{1} << rng() % 12) * kMiB);
    std::vector<double> now;
    std::vector<std::int64_t> bytes;
    double clock = 0;
    for (int i = 0; i < 60; ++i) {
      now.push_back(clock += rng() % 3 == 0 ? rng() % 100 * 1e-6 : 0);
      bytes.push_back(512 * (1 + rng() % (rng() % 2 == 0 ? 16 : 2048)));
    }
    const std::size_t changed = rng() % 60;
    std::vector<std::int64_t> more = bytes;
    more[changed] += 512 * (1 + rng() % 300);
    DeviceModel a = model, b = model;
    double last = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      const std::int64_t offset = static_cast<std::int64_t>(i % 7) * 100 * kMiB + 1;
      const double one = a.finish(now[i], offset, bytes[i]), other = b.finish(now[i], offset, more[i]);
      PI2_CHECK(other >= one - 1e-12, "read %zu: %g with more bytes, %g", i, other, one);
      PI2_CHECK(one > last && one > now[i], "read %zu is over at %g, before %g", i, one, last);
      last = one;
    }
  }
  return cases;
}

long check_refused() {
  std::vector<double> list = numbers();
  const auto with = [](std::size_t at, double value) {
    std::vector<double> changed = numbers();
    changed[at] = value;
    return changed;
  };
  std::vector<double> longer = numbers();
  longer.push_back(1);
  const std::vector<double> whole = numbers();
  const struct {
    std::vector<double> list;
    const char* message;
  } cases[] = {
      {{}, "expected a latency, a depth and the cost of a core, found the end of the list"},
      {with(11, std::nan("")), "expected finite numbers, found another at position 11"},
      {with(0, HUGE_VAL), "expected finite numbers, found another at position 0"},
      {with(0, -1e-6), "latency: expected 0 to 1 s, found -0.000001"},
      {with(0, 2), "latency: expected 0 to 1 s, found 2.000000"},
      {with(1, 0), "max_depth: expected a whole number up to 65536, found 0.000000"},
      {with(1, 1.5), "max_depth: expected a whole number up to 65536, found 1.500000"},
      {with(2, -1), "cost of the core: expected 0 to 1 s, found -1.000000"},
      {{whole.begin(), whole.begin() + 5}, "random: expected three sizes of axes, found the end of the list"},
      {with(3, 0), "random: blocks: expected 1 to 64 of them, found 0.000000"},
      {with(4, 65), "random: ranges: expected 1 to 64 of them, found 65.000000"},
      {{whole.begin(), whole.begin() + 14}, "random: expected 9 numbers, found 8"},
      {with(7, 4096), "random: blocks: expected 1 or more, ascending, found 4096.000000"},
      {with(8, -5), "random: ranges: expected 1 or more, ascending, found -5.000000"},
      {with(10, 33), "random: depths: expected at most the device's 32, found 33.000000"},
      {with(11, 0), "random: bandwidth: expected 100000 to 1e12 bytes/s, found 0.000000"},
      {with(11, -1e9), "random: bandwidth: expected 100000 to 1e12 bytes/s, found -1000000000.000000"},
      {with(13, 2e11), "random: bandwidth: expected larger blocks to take longer, found 524288 bytes quicker than"},
      {numbers(1e-5),
       "sequential: latency: expected less than what a read of 4096 bytes takes at depth 1, 9.102222 us"},
      {longer, "expected 27 numbers, found 28"},
  };
  for (const auto& c : cases) {
    DeviceModel model;
    const std::string found = DeviceModel::parse(c.list, &model);
    PI2_CHECK(found.find(c.message) == 0, "found '%s', expected '%s'", found.c_str(), c.message);
  }
  return static_cast<long>(std::size(cases));
}

// --- the engine ---

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct File {
  char name[32] = "/tmp/pi2-simulated-XXXXXX";
  int descriptor = mkstemp(name);
  std::vector<char> bytes;

  explicit File(std::mt19937& rng) : bytes(1 << 20) {
    for (char& b : bytes) b = static_cast<char>(rng());
    PI2_CHECK(pwrite(descriptor, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()), "pwrite");
  }
  ~File() {
    close(descriptor);
    unlink(name);
  }
};

struct Told {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<int> times;  // told of each read
  std::vector<double> at;
  std::vector<int> errors;
  int count = 0;
  long calls = 0;
  Clock::time_point start;

  explicit Told(std::size_t n) : times(n), at(n), errors(n) {}

  ReadDone done() {
    return {[](void* self, const ReadResult* results, std::int64_t count) {
              static_cast<Told*>(self)->tell(results, count);
            },
            this};
  }
  void tell(const ReadResult* results, std::int64_t n) {
    const std::lock_guard<std::mutex> lock(mutex);
    ++calls;
    for (std::int64_t i = 0; i < n; ++i) {
      const auto which = static_cast<std::size_t>(reinterpret_cast<std::intptr_t>(results[i].read.owner));
      ++times[which];
      at[which] = since(start);
      errors[which] = results[i].error;
    }
    count += static_cast<int>(n);
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return count == static_cast<int>(times.size()); });
  }
};

// A read every 2 ms, so that what is waited for is far longer than a thread takes to wake.
std::vector<double> slow_device() {
  return {1e-3, 4, 0, 1, 1, 1, 4096, 1, 4, 4096 / 2e-3, 1, 1, 1, 4096, 1, 4, 4096 / 1e-3};
}

long check_engine(std::mt19937& rng, const char* inner, int submitters) {
  const File file(rng);
  constexpr int kReads = 50;
  Told told(kReads);
  std::vector<std::vector<char>> into(kReads, std::vector<char>(4096));
  std::vector<Read> reads(kReads);
  DeviceModel model = device(slow_device(), 1);
  for (int i = 0; i < kReads; ++i) {
    Read& read = reads[static_cast<std::size_t>(i)];
    read.offset = 512 * static_cast<std::int64_t>(rng() % 2000);
    read.bytes = 4096;
    read.into = into[static_cast<std::size_t>(i)].data();
    read.owner = reinterpret_cast<void*>(static_cast<std::intptr_t>(i));
  }
  reads[7].offset = 4 << 20;  // beyond the file's end
  std::atomic<std::int64_t> late{0};
  const bool uring = std::string(inner) == "io_uring";
  std::unique_ptr<ReadEngine> engine = simulated_engine(
      model,
      [&](ReadDone done) {
        return uring ? uring_engine(file.descriptor, 8, done) : pread_engine(file.descriptor, 3, done);
      },
      told.done(), &late);
  if (engine == nullptr && uring) return 0;  // not in this build, or not allowed here
  PI2_CHECK(engine != nullptr, "%s", inner);
  if (engine == nullptr) return 0;
  PI2_CHECK(engine->name() == std::string("simulated device over ") + inner, "%s", engine->name());
  told.start = Clock::now();
  std::vector<std::thread> threads;
  for (int t = 0; t < submitters; ++t)
    threads.emplace_back([&, t] {
      const int first = kReads * t / submitters, last = kReads * (t + 1) / submitters;
      engine->submit(&reads[static_cast<std::size_t>(first)], last - first);
    });
  for (std::thread& thread : threads) thread.join();
  PI2_CHECK(since(told.start) < 0.09, "submitting waits");
  told.wait();
  const double took = since(told.start);
  // In order of asking by one thread; in any order by several, whose reads take as long together.
  double modelled = 0;
  for (int i = 0; i < kReads; ++i) {
    const auto k = static_cast<std::size_t>(i);
    modelled = model.finish(0, reads[k].offset, reads[k].bytes);
    PI2_CHECK(told.times[k] == 1, "read %d was told of %d times", i, told.times[k]);
    PI2_CHECK((told.errors[k] != 0) == (i == 7), "read %d: error %d", i, told.errors[k]);
    if (submitters == 1) PI2_CHECK(told.at[k] >= modelled, "read %d at %g, before %g", i, told.at[k], modelled);
    if (i != 7)
      PI2_CHECK(std::equal(into[k].begin(), into[k].end(), file.bytes.begin() + reads[k].offset), "read %d", i);
  }
  PI2_CHECK(submitters > 1 || (modelled > 0.09 && modelled < 0.11), "%g s", modelled);
  PI2_CHECK(took >= std::min(modelled, 0.09), "%g s, modelled %g", took, modelled);
  PI2_CHECK(took <= 1.5 * modelled + 0.05, "%g s, modelled %g", took, modelled);
  PI2_CHECK(told.calls <= kReads, "%ld calls", told.calls);
  PI2_CHECK(late.load() < kReads / 2, "%ld late", static_cast<long>(late.load()));
  return kReads;
}

// Closing waits for what is under way, which is told of.
long check_closing(std::mt19937& rng) {
  const File file(rng);
  Told told(20);
  std::vector<char> into(20 * 512);
  std::vector<Read> reads(20);
  for (std::size_t i = 0; i < reads.size(); ++i) {
    reads[i].offset = static_cast<std::int64_t>(i % 5) * 4096;
    reads[i].bytes = 512;
    reads[i].into = &into[512 * i];
    reads[i].owner = reinterpret_cast<void*>(i);
  }
  std::unique_ptr<ReadEngine> engine = simulated_engine(
      device(slow_device(), 1), [&](ReadDone done) { return pread_engine(file.descriptor, 2, done); }, told.done());
  told.start = Clock::now();
  engine->submit(reads.data(), 20);
  engine.reset();
  PI2_CHECK(told.count == 20 && since(told.start) >= 0.04, "%d told of after %g s", told.count, since(told.start));
  return 1;
}

// Where the real device is the slower one, reads are told of when they are there, together where they come together.
long check_late() {
  struct Slow final : ReadEngine {
    ReadDone done;
    std::vector<Read> all;
    explicit Slow(ReadDone d) : done(d) {}
    ~Slow() override {
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      std::vector<ReadResult> results;
      for (const Read& read : all) results.push_back({read, read.bytes == 77 ? 5 : 0});
      done.call(done.context, results.data(), static_cast<std::int64_t>(results.size()));
    }
    void submit(const Read* reads, std::int64_t count) override {
      if (count == 1) throw std::bad_alloc();
      all.assign(reads, reads + count);
    }
    const char* name() const override { return "slow"; }
  };
  constexpr int kReads = 200;
  Told told(kReads);
  std::atomic<std::int64_t> late{0};
  std::unique_ptr<ReadEngine> engine = simulated_engine(
      device(numbers()), [](ReadDone done) { return std::make_unique<Slow>(done); }, told.done(), &late);
  std::vector<Read> reads(kReads);
  for (std::size_t i = 0; i < kReads; ++i) {
    reads[i].offset = static_cast<std::int64_t>(i) * 8192;
    reads[i].bytes = i == 100 ? 77 : 4096;
    reads[i].owner = reinterpret_cast<void*>(i);
  }
  bool thrown = false;
  try {
    engine->submit(reads.data(), 1);
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  PI2_CHECK(thrown && told.count == 0, "what the inner engine throws");
  told.start = Clock::now();
  engine->submit(reads.data(), kReads);
  engine.reset();
  PI2_CHECK(told.count == kReads && late.load() == kReads, "%d told of, %ld late", told.count,
            static_cast<long>(late.load()));
  PI2_CHECK(told.calls <= 4, "%ld calls", told.calls);
  for (std::size_t i = 0; i < kReads; ++i)
    PI2_CHECK(told.times[i] == 1 && told.errors[i] == (i == 100 ? 5 : 0), "read %zu", i);
  PI2_CHECK(simulated_engine(device(numbers()), [](ReadDone) { return nullptr; }, told.done()) == nullptr, "none");
  return 4;
}

// Stores over a device.
long check_store(std::mt19937& rng) {
  const pi2_test::StoreFixture store(rng, 1, 64, 2, 32, DType::kF32);
  OffloadOptions options;
  std::string problem;
  options.direct = false;
  options.device = numbers();
  for (const char* engine : {"pread", "io_uring"}) {
    options.engine = engine;
    const std::unique_ptr<Offload> offload = Offload::open(store.path, options, &problem);
    if (offload == nullptr && problem.find("io_uring is not available") != std::string::npos) continue;
    PI2_CHECK(offload != nullptr, "%s", problem.c_str());
    if (offload == nullptr) continue;
    PI2_CHECK(offload->describe() == std::string("simulated device over ") + engine + ", page cache", "%s",
              offload->describe().c_str());
    FfnArgs args;
    const std::vector<float> x = pi2_test::floats(rng, 32);
    std::vector<float> wanted(32), y(32);
    args.x = x.data();
    args.y = wanted.data();
    args.tokens = 1;
    args.hidden = 32;
    args.neurons = 64;
    args.rows = 2;
    args.w_dtype = DType::kF32;
    args.neuron_rows = store.neuron_rows[0].data();
    sparse_ffn(args, serial());
    args.neuron_rows = nullptr;
    args.y = y.data();
    ThreadPool pool(2);
    const std::string wrong = offload->ffn(0, Predictor(), args, pool.parallel());
    PI2_CHECK(wrong.empty() && y == wanted, "%s: %s", engine, wrong.c_str());
    const OffloadStats stats = offload->stats(true);
    PI2_CHECK(stats.reads > 0 && stats.late <= stats.reads && offload->stats(false).late == 0, "late");
  }
  options.engine = "mmap";
  PI2_CHECK(Offload::open(store.path, options, &problem) == nullptr &&
                problem == "device: expected engine pread or io_uring, found mmap, whose reads are the system's",
            "%s", problem.c_str());
  options.engine = "pread";
  options.device = {1};
  PI2_CHECK(Offload::open(store.path, options, &problem) == nullptr && problem.find("device: expected a latency") == 0,
            "%s", problem.c_str());
  return 4;
}

}  // namespace

int main() {
  std::mt19937 rng(11);
  long cases = check_figures() + check_times() + check_monotone(rng) + check_refused();
  for (const char* inner : {"pread", "io_uring"})
    for (const int submitters : {1, 3}) cases += check_engine(rng, inner, submitters);
  cases += check_closing(rng);
  cases += check_late();
  cases += check_store(rng);
  return pi2_test::finish("test_simulated", cases);
}
