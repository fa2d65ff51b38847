#include "pi2/offload.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "core/crc32c.h"
#include "core/neuron_cache.h"
#include "core/store_file.h"
#include "pi2/memory.h"
#include "pi2/read_engine.h"

namespace pi2 {
namespace {

using Clock = std::chrono::steady_clock;

std::int64_t since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

constexpr std::int64_t rounded(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

// Anonymous memory that is only taken as it is written to.
class Arena {
 public:
  ~Arena() {
    if (data_ != nullptr) munmap(data_, static_cast<std::size_t>(bytes_));
  }

  bool allocate(std::int64_t bytes, bool huge) {
    if (bytes == 0) return true;
    void* at =
        mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return false;
    data_ = static_cast<char*>(at);
    bytes_ = bytes;
    if (huge) advise_huge_pages(data_, bytes);
    return true;
  }

  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// Neighbouring bundles that are read together.
struct Run {
  std::int64_t chunk = 0, first = 0, last = 0;  // neurons
  const std::int64_t* ids = nullptr;            // those that are wanted, ascending
  std::int64_t count = 0;
};

struct Chunk {
  const std::int64_t* ids = nullptr;
  std::int64_t count = 0;
  std::vector<std::int64_t> missing;
  std::int64_t runs_left = 0;
  std::int64_t region = -1;
  bool in_region = false;  // some bundles are computed where they were read
};

}  // namespace

// Its own source: see BundleSource.
struct Offload::State final : BundleSource {
  OffloadOptions options;
  StoreFile file;
  std::unique_ptr<NeuronCache> cache;
  std::unique_ptr<ReadEngine> engine;
  Arena slots, staging;
  const char* mapped = nullptr;
  std::int64_t slot_bytes = 0;    // of the cache: the largest bundle
  std::int64_t region_bytes = 0;  // the largest chunk
  std::vector<std::int64_t> first_key;
  std::vector<std::vector<const char*>> where;  // [layers][neurons], of the last call
  pid_t process = 0;

  std::mutex turn;  // one call at a time

  // Of the call under way; `mutex` guards what I/O threads and workers share.
  std::mutex mutex;
  std::condition_variable changed;
  std::int64_t layer = 0;
  std::vector<Chunk> chunks;
  std::deque<Run> runs;
  std::deque<std::int64_t> ready, waiting;
  std::vector<std::int64_t> free_regions;
  std::int64_t given = 0, total = 0, reading = 0;
  Clock::time_point io_since;
  std::atomic<bool> broken{false};
  std::string problem;
  OffloadStats sums;
  std::int64_t evictions_before = 0;

  ~State() override {
    engine.reset();  // before what its threads use
    if (mapped != nullptr) munmap(const_cast<char*>(mapped), static_cast<std::size_t>(file.file_bytes()));
  }

  const StoreLayer& about(std::int64_t l) const { return file.layers()[static_cast<std::size_t>(l)]; }
  char* slot(std::int64_t index) const { return slots.data() + index * slot_bytes; }

  std::string set_up(const std::string& path);
  std::string preload();
  std::string load_first(const std::vector<std::int64_t>& count, std::int64_t most);
  std::string call(std::int64_t l, const std::function<void(BundleSource*)>& compute, int threads);
  void drain(std::unique_lock<std::mutex>* lock);
  void forget_missing();

  void begin(const std::int64_t* ids, const std::int64_t* counts, std::int64_t chunk_size,
             std::int64_t n_chunks) override;
  std::int64_t next() override;
  void done(std::int64_t chunk) override;
  const char* const* bundles() const override { return where[static_cast<std::size_t>(layer)].data(); }
  bool failed() const override { return broken.load(std::memory_order_acquire); }
  void submit_waiting();
  void submit_chunks();
  void release(Chunk* chunk);
  void arrived(const Read& read, int error);
  std::string check(const Run& run, const Read& read, int error);
};

std::string Offload::State::set_up(const std::string& path) {
  process = getpid();
  CachePolicy policy;
  std::string wrong = policy_of(options.policy, &policy);
  if (!wrong.empty()) return "policy: " + wrong;
  const bool map = options.engine == "mmap";
  if (!map && options.engine != "pread" && options.engine != "io_uring")
    return "engine: expected pread, io_uring or mmap, found '" + options.engine + "'";
  if (options.cache_bytes < 0 || options.io_threads < 1 || options.in_flight < 1 || options.window < 0 ||
      !(options.hot_share >= 0 && options.hot_share <= 1))
    return "options: expected no negative sizes, at least one thread and chunk in flight, and a hot share of 0 to 1";
  options.in_flight = std::min<std::int64_t>(options.in_flight, 16);  // a layer has no more chunks
  options.window = std::min<std::int64_t>(options.window, 1 << 30);
  options.run_bytes = std::min<std::int64_t>(options.run_bytes, 1 << 30);
  options.io_threads = std::min(options.io_threads, 1024);
  wrong = file.open(path, options.direct && !map);
  if (!wrong.empty()) return wrong;
  std::int64_t keys = 0;
  for (const StoreLayer& l : file.layers()) {
    first_key.push_back(keys);
    keys += l.neurons;
    slot_bytes = std::max(slot_bytes, rounded(l.bundle_bytes(), 64));
    region_bytes =
        std::max(region_bytes, rounded(std::min(chunk_neurons(l.neurons), l.neurons) * l.slot_bytes, kStorePage));
    where.emplace_back(static_cast<std::size_t>(l.neurons), nullptr);
  }
  first_key.push_back(keys);
  if (keys >= std::int64_t{1} << 31) return std::to_string(keys) + " neurons, more than a cache can name";
  if (map) {
    void* at =
        mmap(nullptr, static_cast<std::size_t>(file.file_bytes()), PROT_READ, MAP_SHARED, file.plain_descriptor(), 0);
    if (at == MAP_FAILED) return "the file cannot be mapped";
    mapped = static_cast<const char*>(at);
    madvise(at, static_cast<std::size_t>(file.file_bytes()), MADV_RANDOM);
    for (std::size_t l = 0; l < where.size(); ++l)
      for (std::int64_t i = 0; i < file.layers()[l].neurons; ++i)
        where[l][static_cast<std::size_t>(i)] = mapped + file.layers()[l].slots + i * file.layers()[l].slot_bytes;
    cache = std::make_unique<NeuronCache>(keys, 0, policy);
    return "";
  }
  const std::int64_t n_slots = std::min(keys, options.cache_bytes / slot_bytes);
  cache = std::make_unique<NeuronCache>(keys, n_slots, policy);
  if (!slots.allocate(n_slots * slot_bytes, true) || !staging.allocate(options.in_flight * region_bytes, false))
    return "no memory for a cache of " + std::to_string(n_slots * slot_bytes) + " bytes";
  // A child forked while the device writes here would get pages that the writes then miss.
  if (staging.data() != nullptr)
    madvise(staging.data(), static_cast<std::size_t>(options.in_flight * region_bytes), MADV_DONTFORK);
  for (std::int64_t r = options.in_flight - 1; r >= 0; --r) free_regions.push_back(r);
  const ReadDone told{[](void* self, const Read& read, int error) { static_cast<State*>(self)->arrived(read, error); },
                      this};
  if (options.engine == "io_uring") engine = uring_engine(file.descriptor(), options.io_threads, told);
  if (options.engine == "pread") engine = pread_engine(file.descriptor(), options.io_threads, told);
  if (engine == nullptr && options.engine == "pread") return "engine: no thread could be started for reading";
  if (engine == nullptr) return "engine: io_uring is not available here (or not in this build); use pread";
  return "";
}

void Offload::State::begin(const std::int64_t* ids, const std::int64_t* counts, std::int64_t chunk_size,
                           std::int64_t n_chunks) {
  std::unique_lock<std::mutex> lock(mutex);
  drain(&lock);  // of the tokens before, if reading has broken
  if (broken) return;
  std::vector<const char*>& at = where[static_cast<std::size_t>(layer)];
  chunks.assign(static_cast<std::size_t>(n_chunks), Chunk());
  runs.clear();
  ready.clear();
  waiting.clear();
  given = 0;
  total = n_chunks;
  if (mapped != nullptr) {
    for (std::int64_t c = 0; c < n_chunks; ++c) {
      sums.wanted += counts[c];
      ready.push_back(c);
    }
    return;
  }
  const std::int64_t key = first_key[static_cast<std::size_t>(layer)];
  cache->begin();
  // What is there is pinned before room is made for what is not.
  for (std::int64_t c = 0; c < n_chunks; ++c) {
    Chunk& chunk = chunks[static_cast<std::size_t>(c)];
    chunk.ids = ids + c * chunk_size;
    chunk.count = counts[c];
    sums.wanted += chunk.count;
    for (std::int64_t k = 0; k < chunk.count; ++k) {
      const std::int64_t id = chunk.ids[k];
      const std::int64_t found = cache->look_up(key + id);
      if (found >= 0)
        at[static_cast<std::size_t>(id)] = slot(found);
      else
        chunk.missing.push_back(id);
    }
    sums.hits += chunk.count - static_cast<std::int64_t>(chunk.missing.size());
  }
  if (options.window > 0) {
    const std::int64_t calls_per_token = static_cast<std::int64_t>(file.layers().size());
    cache->erase_older(key, first_key[static_cast<std::size_t>(layer) + 1],
                       cache->now() - options.window * calls_per_token);
  }
  for (std::int64_t c = 0; c < n_chunks; ++c) {
    Chunk& chunk = chunks[static_cast<std::size_t>(c)];
    for (const std::int64_t id : chunk.missing) {
      const std::int64_t made = cache->insert(key + id);
      at[static_cast<std::size_t>(id)] = made >= 0 ? slot(made) : nullptr;
      if (made < 0) {
        chunk.in_region = true;
        ++sums.uncached;
      }
    }
    (chunk.missing.empty() ? ready : waiting).push_back(c);
  }
  submit_waiting();
}

// With the lock, on any thread: reads of as many chunks as there are regions to read into.
void Offload::State::submit_waiting() {
  try {
    submit_chunks();
  } catch (const std::bad_alloc&) {
    problem = "no memory";
    broken.store(true, std::memory_order_release);
    changed.notify_all();
  }
}

void Offload::State::submit_chunks() {
  const StoreLayer& l = about(layer);
  std::vector<Read> reads;
  while (!waiting.empty() && !free_regions.empty() && !broken) {
    const std::int64_t c = waiting.front();
    waiting.pop_front();
    Chunk& chunk = chunks[static_cast<std::size_t>(c)];
    chunk.region = free_regions.back();
    free_regions.pop_back();
    char* into = staging.data() + chunk.region * region_bytes;
    const std::vector<std::int64_t>& ids = chunk.missing;
    for (std::size_t i = 0; i < ids.size();) {
      std::size_t end = i + 1;
      while (end < ids.size() && ids[end] == ids[end - 1] + 1 &&
             (ids[end] - ids[i] + 1) * l.slot_bytes <= options.run_bytes)
        ++end;
      runs.push_back({c, ids[i], ids[end - 1], &ids[i], static_cast<std::int64_t>(end - i)});
      Read read;
      read.offset = l.slots + ids[i] * l.slot_bytes;
      read.bytes = (ids[end - 1] - ids[i] + 1) * l.slot_bytes;
      read.into = into;
      read.owner = &runs.back();
      into += read.bytes;
      reads.push_back(read);
      ++chunk.runs_left;
      i = end;
    }
  }
  if (reads.empty()) return;
  engine->submit(reads.data(), static_cast<std::int64_t>(reads.size()));
  // After it, in case it throws; reads that are over already wait for the lock.
  if (reading == 0) io_since = Clock::now();
  reading += static_cast<std::int64_t>(reads.size());
  sums.reads += static_cast<std::int64_t>(reads.size());
  for (const Read& read : reads) sums.bytes_read += read.bytes;
}

std::string Offload::State::check(const Run& run, const Read& read, int error) {
  const StoreLayer& l = about(layer);
  if (error != 0)
    return "layer " + std::to_string(layer) + ", neuron " + std::to_string(run.first) + ", " +
           std::to_string(read.bytes) + " bytes at " + std::to_string(read.offset) + ": " + std::strerror(error);
  if (!options.verify) return "";
  for (std::int64_t k = 0; k < run.count; ++k) {
    const std::int64_t id = run.ids[k];
    const char* bundle = read.into + (id - run.first) * l.slot_bytes;
    if (crc32c(bundle, static_cast<std::size_t>(l.bundle_bytes())) != file.checks(layer)[id])
      return "layer " + std::to_string(layer) + ", neuron " + std::to_string(id) + " at " +
             std::to_string(l.slots + id * l.slot_bytes) + ": its checksum does not match";
  }
  return "";
}

// On an I/O thread: bundles are checked and copied without the lock (their slots are pinned by this call).
void Offload::State::arrived(const Read& read, int error) {
  const Run& run = *static_cast<const Run*>(read.owner);
  const StoreLayer& l = about(layer);
  const std::string wrong = check(run, read, error);
  if (wrong.empty()) {
    std::vector<const char*>& at = where[static_cast<std::size_t>(layer)];
    for (std::int64_t k = 0; k < run.count; ++k) {
      const auto id = static_cast<std::size_t>(run.ids[k]);
      char* bundle = read.into + (run.ids[k] - run.first) * l.slot_bytes;
      if (at[id] != nullptr)
        std::memcpy(const_cast<char*>(at[id]), bundle, static_cast<std::size_t>(l.bundle_bytes()));
      else
        at[id] = bundle;
    }
  }
  const std::lock_guard<std::mutex> lock(mutex);
  Chunk& chunk = chunks[static_cast<std::size_t>(run.chunk)];
  if (!wrong.empty() && !broken) {
    problem = wrong;
    broken.store(true, std::memory_order_release);
  }
  const bool whole = --chunk.runs_left == 0;
  if (whole) {
    if (!chunk.in_region) release(&chunk);
    ready.push_back(run.chunk);
    submit_waiting();
  }
  if (--reading == 0) sums.io_ns += since(io_since);
  // Workers are woken for a chunk, not for each of its hundreds of bundles.
  if (whole || reading == 0 || broken) changed.notify_all();
}

// With the lock.
void Offload::State::release(Chunk* chunk) {
  if (chunk->region < 0) return;
  free_regions.push_back(chunk->region);
  chunk->region = -1;
}

std::int64_t Offload::State::next() {
  std::unique_lock<std::mutex> lock(mutex);
  const auto stop = [this] { return broken || given == total; };
  const auto may_begin = [this] { return !ready.empty() && (options.pipeline || (reading == 0 && waiting.empty())); };
  // Without the pipeline chunks that compute where they were read hold regions that others wait for: those go on.
  const auto stuck = [this] { return !ready.empty() && reading == 0 && free_regions.empty(); };
  if (!stop() && !may_begin() && !stuck()) {
    const Clock::time_point start = Clock::now();
    changed.wait(lock, [&] { return stop() || may_begin() || stuck(); });
    sums.wait_ns += since(start);
  }
  if (stop()) return -1;
  const std::int64_t c = ready.front();
  ready.pop_front();
  if (++given == total) changed.notify_all();
  return c;
}

void Offload::State::done(std::int64_t c) {
  const std::lock_guard<std::mutex> lock(mutex);
  Chunk& chunk = chunks[static_cast<std::size_t>(c)];
  if (chunk.region < 0) return;
  release(&chunk);
  submit_waiting();
}

// With the lock: until no read of the call is under way any more.
void Offload::State::drain(std::unique_lock<std::mutex>* lock) {
  changed.wait(*lock, [this] { return reading == 0; });
}

std::string Offload::State::call(std::int64_t l, const std::function<void(BundleSource*)>& compute, int threads) {
  if (getpid() != process) return "the store was opened in another process (fork): open it again in this one";
  const std::lock_guard<std::mutex> one(turn);
  const Clock::time_point start = Clock::now();
  {
    const std::lock_guard<std::mutex> lock(mutex);
    layer = l;
    broken = false;
    problem.clear();
    chunks.clear();
  }
  try {
    compute(this);
  } catch (...) {  // no memory: what was asked for must not be taken for read
    std::unique_lock<std::mutex> lock(mutex);
    broken = true;
    drain(&lock);
    forget_missing();
    throw;
  }
  std::unique_lock<std::mutex> lock(mutex);
  drain(&lock);
  ++sums.calls;
  sums.busy_ns += since(start) * threads;
  if (!broken) return "";
  forget_missing();
  return problem;
}

// With the lock, after a failure: what this call made room for may never have come.
void Offload::State::forget_missing() {
  const std::int64_t key = first_key[static_cast<std::size_t>(layer)];
  for (Chunk& chunk : chunks) {
    for (const std::int64_t id : chunk.missing) cache->erase(key + id);
    release(&chunk);
  }
}

// Neurons of every layer from the first on, as many as there are slots, in pieces of a region.
std::string Offload::State::preload() {
  if (getpid() != process) return "the store was opened in another process (fork): open it again in this one";
  const std::lock_guard<std::mutex> one(turn);
  const std::lock_guard<std::mutex> lock(mutex);
  const std::int64_t keys = first_key.back(), free = cache->slots() - cache->used();
  if (mapped != nullptr || free <= 0) return "";
  std::vector<std::int64_t> count;
  std::int64_t most = 0;
  for (const StoreLayer& l : file.layers()) {
    count.push_back(static_cast<std::int64_t>(static_cast<double>(free) * static_cast<double>(l.neurons) /
                                              static_cast<double>(keys)));
    most = std::max(most, count.back());
  }
  // Whatever ends this early, nothing of it may be taken for loaded.
  const auto forget = [&] {
    for (std::size_t k = 0; k < count.size(); ++k)
      for (std::int64_t rank = 0; rank < count[k]; ++rank) cache->erase(first_key[k] + rank);
  };
  try {
    const std::string wrong = load_first(count, most);
    if (!wrong.empty()) forget();
    return wrong;
  } catch (...) {
    forget();
    throw;
  }
}

std::string Offload::State::load_first(const std::vector<std::int64_t>& count, std::int64_t most) {
  cache->begin();
  for (std::int64_t rank = most - 1; rank >= 0; --rank) {  // the most frequent last: the last to leave
    for (std::size_t l = 0; l < count.size(); ++l) {
      const std::int64_t key = first_key[l] + rank;
      const bool hot = static_cast<double>(rank) < options.hot_share * static_cast<double>(count[l]);
      if (rank < count[l] && !cache->contains(key)) cache->insert(key, hot);
    }
  }
  for (std::size_t l = 0; l < count.size(); ++l) {
    const StoreLayer& about_l = file.layers()[l];
    layer = static_cast<std::int64_t>(l);
    const std::int64_t piece = std::max<std::int64_t>(1, region_bytes / about_l.slot_bytes);
    for (std::int64_t first = 0; first < count[l]; first += piece) {
      const std::int64_t n = std::min(piece, count[l] - first);
      std::vector<std::int64_t> ids(static_cast<std::size_t>(n));
      for (std::int64_t k = 0; k < n; ++k) ids[static_cast<std::size_t>(k)] = first + k;
      const Run run{0, first, first + n - 1, ids.data(), n};
      Read read;
      read.offset = about_l.slots + first * about_l.slot_bytes;
      read.bytes = n * about_l.slot_bytes;
      read.into = staging.data();
      const std::string wrong = check(run, read, read_fully(file.descriptor(), read.into, read.bytes, read.offset));
      if (!wrong.empty()) return wrong;
      for (const std::int64_t id : ids) {
        const std::int64_t at = cache->slot_of(first_key[l] + id);  // not a use: the order is that of insertion
        if (at >= 0)
          std::memcpy(slot(at), read.into + (id - first) * about_l.slot_bytes,
                      static_cast<std::size_t>(about_l.bundle_bytes()));
      }
    }
  }
  return "";
}

Offload::Offload(std::unique_ptr<State> state) : state_(std::move(state)) {}
// In a forked child the engine's threads do not exist, and locks may be held by them: nothing can be taken down there.
Offload::~Offload() {
  if (state_ != nullptr && state_->process != 0 && state_->process != getpid()) (void)state_.release();
}

std::unique_ptr<Offload> Offload::open(const std::string& path, const OffloadOptions& options, std::string* problem) {
  auto state = std::make_unique<State>();
  state->options = options;
  *problem = state->set_up(path);
  if (!problem->empty()) return nullptr;
  return std::unique_ptr<Offload>(new Offload(std::move(state)));
}

std::int64_t Offload::layers() const { return static_cast<std::int64_t>(state_->file.layers().size()); }

FfnArgs Offload::shape(std::int64_t layer) const {
  const StoreLayer& l = state_->about(layer);
  FfnArgs args;
  args.hidden = l.hidden;
  args.neurons = l.neurons;
  args.rows = l.rows;
  args.w_dtype = l.w_dtype;
  args.n_hot = l.n_hot;
  return args;
}

std::string Offload::ffn(std::int64_t layer, FfnArgs args, const ParallelFor& parallel) {
  return state_->call(
      layer,
      [&](BundleSource* source) {
        args.source = source;
        sparse_ffn(args, parallel);
      },
      std::max(1, parallel.threads));
}

std::string Offload::ffn(std::int64_t layer, const LowrankArgs& predictor, FfnArgs args, const ParallelFor& parallel) {
  return state_->call(
      layer,
      [&](BundleSource* source) {
        args.source = source;
        predicted_ffn(predictor, args, parallel);
      },
      std::max(1, parallel.threads));
}

std::string Offload::ffn(std::int64_t layer, const SignbitArgs& predictor, FfnArgs args, const ParallelFor& parallel) {
  return state_->call(
      layer,
      [&](BundleSource* source) {
        args.source = source;
        predicted_ffn(predictor, args, parallel);
      },
      std::max(1, parallel.threads));
}

std::string Offload::preload() { return state_->preload(); }

OffloadStats Offload::stats(bool reset) {
  if (state_->process != getpid()) return OffloadStats();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  OffloadStats stats = state_->sums;
  stats.evictions = state_->cache->evictions() - state_->evictions_before;
  stats.resident = state_->cache->used();
  stats.slots = state_->cache->slots();
  stats.cache_bytes = stats.slots * state_->slot_bytes;
  stats.staging_bytes = state_->mapped != nullptr ? 0 : state_->options.in_flight * state_->region_bytes;
  if (reset) {
    state_->sums = OffloadStats();
    state_->evictions_before = state_->cache->evictions();
  }
  return stats;
}

std::string Offload::describe() const {
  if (state_->mapped != nullptr) return "mmap";
  return std::string(state_->engine->name()) + (state_->file.direct() ? ", direct" : ", page cache");
}

}  // namespace pi2
