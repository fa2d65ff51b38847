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
#include <system_error>
#include <thread>
#include <vector>

#include "base/arena.h"
#include "base/crc32c.h"
#include "base/trace.h"
#include "cache/access_log.h"
#include "cache/arrangement.h"
#include "cache/cache_use.h"
#include "cache/neuron_cache.h"
#include "engine/read_batch.h"
#include "io/read_fully.h"
#include "io/simulated.h"
#include "pi2/read_engine.h"
#include "store/store_file.h"

namespace pi2 {
namespace {

using Clock = std::chrono::steady_clock;

std::int64_t since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

constexpr std::int64_t rounded(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

constexpr std::int64_t kAhead = 16;  // neurons between one that is looked up and one that is going to be
// A worker that sleeps is often woken on a core where another one spins in OpenMP's barrier: on two cores a 7B model
// decodes 1.4 times as fast if workers give way instead of sleeping for as long as a layer's reads take.
constexpr std::chrono::milliseconds kSpin{4};
constexpr std::int64_t kPieceBytes = 4 << 20;      // of preload()
constexpr std::int64_t kArrangingBytes = 1 << 20;  // that may be on the way for arrange() while no call waits for reads
constexpr std::int64_t kArrangedAtOnce = 512;      // slots that are looked at for it before calls may go on
constexpr char kForked[] = "the store was opened in another process (fork): open it again in this one";
constexpr char kShorter[] = "the file has become shorter since it was opened";
constexpr char kMapped[] = "engine: expected pread or io_uring, found mmap, whose memory is the system's";

// What is wrong with a read, or with a call: kept without memory, of which threads that read may have none. Whoever
// waits puts it into words.
struct Wrong {
  const char* why = nullptr;  // null: nothing is
  int error = 0;              // errno, instead of `why`
  std::int64_t layer = -1, neuron = -1, bytes = 0, offset = 0;

  explicit operator bool() const { return why != nullptr || error != 0; }

  std::string words() const {
    if (!*this || layer < 0) return why == nullptr ? "" : why;
    return "layer " + std::to_string(layer) + ", neuron " + std::to_string(neuron) +
           (bytes > 0 ? ", " + std::to_string(bytes) + " bytes" : "") + " at " + std::to_string(offset) + ": " +
           (error != 0 ? std::strerror(error) : why);
  }
};

constexpr Wrong kNoMemory{"no memory"};

// Of the call under way. A slot of the file is in one chunk only: clusters divide chunks.
struct Chunk {
  const std::int64_t* ids = nullptr;
  std::int64_t count = 0;
  std::vector<std::int64_t> missing;  // slots of the file
  std::size_t asked = 0;              // of them, reads have begun of so many
  std::int64_t on_the_way = 0;        // slots of the file
  std::vector<std::int32_t> spares;   // places that it gives back
  std::vector<Wanted> to_keep;        // of them, what the cache takes over then

  bool there() const { return on_the_way == 0 && asked == missing.size(); }
};

}  // namespace

// Its own source: see BundleSource. A *slot of the file* has a cluster of bundles (mostly one); a *place* is memory for
// one: first those of the cache, which outlive calls, then spares for what the cache has no room for.
struct Offload::State final : BundleSource {
  OffloadOptions options;
  StoreFile file;
  std::unique_ptr<NeuronCache> cache;
  std::unique_ptr<ReadEngine> engine;
  std::atomic<std::int64_t> late{0};  // see OffloadStats
  Arena places;
  const char* mapped = nullptr;
  std::int64_t place_bytes = 0, n_spares = 0;
  std::int64_t most_slots = 0;                       // of the cache: that there are places for
  std::vector<std::int64_t> first_key;               // of the cache, by layer: keys are slots of the file
  std::vector<std::int64_t> left_out;                // by layer: first slots that nobody wants, or empty
  std::vector<std::deque<std::int64_t>> last_calls;  // by layer: when, if there is a window
  std::vector<std::vector<const char*>> where;       // [layers][neurons], of the last call
  pid_t process = 0;

  // One call at a time. Who waits for the turn holds the door, so that the next call does not overtake.
  std::mutex door, turn;

  std::mutex mutex;  // of everything below, and of the cache
  std::condition_variable changed;
  std::atomic<std::uint64_t> news{0};        // how often it was told
  std::vector<std::uint8_t> loading, guess;  // by place: its bytes are on their way; nobody has wanted them yet
  std::vector<std::uint8_t> dropped;         // by place: a spare whose bytes are on their way, and wanted no more
  std::vector<std::int16_t> waiter;          // by place: the chunk that waits for it, or -1
  std::vector<std::int32_t> free_spares;
  std::int64_t layer = 0;
  std::vector<Chunk> chunks;
  std::deque<std::int64_t> ready, waiting;  // chunks: to be computed; with slots that no read was begun of
  std::int64_t given = 0, finished = 0, total = 0, reading = 0;
  std::int64_t under_way = 0;  // reads: `reading` that this call waits for, and guesses
  bool begun = false, stream = false, last_piece = true;
  const std::uint8_t* keep_anyway = nullptr;  // [neurons] or null: of what is streamed, what the cache takes
  // Of streams: the layer that is likely to be streamed next, the slot of it that is read next, and by slot the spare
  // that it is read into, or -1. `follower`: by layer, the one that was streamed after it, or is likely to be.
  std::int64_t ahead_layer = -1, ahead_next = 0, streamed_last = -1;
  std::vector<std::int32_t> ahead;
  std::vector<std::int64_t> follower;
  bool whole = false;  // this stream wants most of its layer
  const std::function<void()>* then = nullptr;
  Clock::time_point io_since;
  std::atomic<bool> broken{false};
  Wrong problem;
  OffloadStats sums;
  std::int64_t evictions_before = 0;
  std::unique_ptr<AccessLog> log;  // null: nobody asked for one
  bool untold = false;             // the cache was changed by what no log has
  bool calling = false, preloaded = false;

  // Of arrange(): what was asked for (empty: nothing), and what becomes of it, by a thread of its own.
  std::vector<std::int64_t> resident;  // neurons, by layer
  Arrangement arrangement;
  std::int64_t arranging = 0;  // slots that are read for it
  bool settled = true;         // nothing is left to be done for it
  bool blocked = false;        // everything in the cache is pinned
  int paused = 0;              // somebody needs that nothing is read
  bool ending = false;
  std::condition_variable work;
  std::thread arranger;

  ~State() override {
    if (arranger.joinable()) {
      {
        const std::lock_guard<std::mutex> lock(mutex);
        ending = true;
      }
      work.notify_one();
      arranger.join();
    }
    engine.reset();  // before what its threads use
    if (mapped != nullptr) munmap(const_cast<char*>(mapped), static_cast<std::size_t>(file.file_bytes()));
  }

  // With the lock.
  void begun_reading(const ReadBatch& batch) {
    if (under_way == 0) io_since = Clock::now();
    under_way += batch.left;
    if (batch.asked_for) reading += batch.left;
  }
  void ended_reading(const ReadBatch& batch) {
    if (--under_way == 0) sums.io_ns += since(io_since);
    if (batch.asked_for) --reading;
  }
  void tell() {
    news.fetch_add(1);
    changed.notify_all();
  }
  const StoreLayer& about(std::int64_t l) const { return file.layers()[static_cast<std::size_t>(l)]; }
  std::int64_t first_wanted(std::int64_t l) const {
    return left_out.empty() ? 0 : left_out[static_cast<std::size_t>(l)];
  }
  std::int64_t key_of(std::int64_t l) const { return first_key[static_cast<std::size_t>(l)]; }
  char* place(std::int64_t index) const { return places.data() + index * place_bytes; }

  // What is read of a slot: its bundles, not the padding behind them.
  std::int64_t read_bytes(const StoreLayer& l) const { return rounded(l.cluster * l.bundle_bytes(), file.unit()); }

  std::string set_up(const std::string& path);
  std::string make_places(std::int64_t keys, CachePolicy policy);
  std::string preload();
  Wrong load_first(std::vector<std::int64_t> made);
  std::unique_lock<std::mutex> take_turn();
  std::string refused_size(std::int64_t cache_bytes) const;
  std::int64_t slots_for(std::int64_t cache_bytes) const;
  void change_size(std::int64_t slots);
  std::string resize(std::int64_t cache_bytes, double hot_share);
  std::string arrange(const std::vector<std::int64_t>& neurons, std::int64_t cache_bytes);
  void leave_out(const std::vector<std::int64_t>& first);
  void rearrange(std::int64_t slots);
  void wake_arranger();
  void run_arranger();
  bool may_arrange() const;
  std::unique_ptr<ReadBatch> arrange_some();
  std::unique_ptr<ReadBatch> bring(const Arrangement::Piece& piece);
  void release(const Arrangement::Piece& piece);
  void settle();
  void write_down(std::int64_t hits);
  std::string call(std::int64_t l, const std::function<void(BundleSource*)>& compute, int threads);
  void clean_up(std::unique_lock<std::mutex>* lock);
  void prefetch(std::int64_t l, std::int64_t n_hot, const std::uint8_t* active, std::int64_t tokens);

  void expect(std::int64_t n_chunks, bool in_order, bool last) override;
  void begin(const std::int64_t* ids, const std::int64_t* counts, std::int64_t chunk_size, std::int64_t n_chunks,
             const std::uint8_t* keep) override;
  std::int64_t next() override;
  void done(std::int64_t chunk) override;
  const char* const* bundles() const override { return where[static_cast<std::size_t>(layer)].data(); }
  bool failed() const override { return broken.load(std::memory_order_acquire); }
  void look_up(std::int64_t c);
  bool keeps(const StoreLayer& l, std::int64_t in_file) const;
  void ask(std::unique_lock<std::mutex>* lock);
  void free_spare(std::int32_t p);
  void follow();
  std::int64_t taken_ahead(std::int64_t in_file, Chunk* chunk);
  void drop_ahead();
  void read_ahead(std::unique_lock<std::mutex>* lock);
  std::unique_ptr<ReadBatch> take_ahead();
  std::unique_ptr<ReadBatch> take(std::int64_t c);
  bool submit(std::unique_ptr<ReadBatch> batch);
  void fail(const Wrong& why) noexcept;
  void arrived(const ReadResult* results, std::int64_t count) noexcept;
  void over(const ReadRun& run, const Wrong& wrong) noexcept;
  bool missed(std::int64_t c, std::int64_t in_file);
  void empty_again(std::int64_t l, const Wanted& wanted);
  Wrong check(const ReadRun& run, const ReadResult& result) const noexcept;
  Wrong check_bundles(std::int64_t l, std::int64_t in_file, const char* data) const noexcept;
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
      options.gap_bytes < 0 || !(options.hot_share >= 0 && options.hot_share <= 1))
    return "options: expected no negative sizes, at least one thread and chunk in flight, and a hot share of 0 to 1";
  options.in_flight = std::min<std::int64_t>(options.in_flight, 16);  // a layer has no more chunks
  options.window = std::min<std::int64_t>(options.window, 1 << 30);
  options.run_bytes = std::min<std::int64_t>(options.run_bytes, 1 << 30);
  options.gap_bytes = std::min<std::int64_t>(options.gap_bytes, 1 << 24);
  options.io_threads = std::min(options.io_threads, 1024);
  DeviceModel device;
  if (!options.device.empty()) {
    wrong = DeviceModel::parse(options.device, &device);
    if (!wrong.empty()) return "device: " + wrong;
    if (map) return "device: expected engine pread or io_uring, found mmap, whose reads are the system's";
  }
  wrong = file.open(path, options.direct && !map);
  if (!wrong.empty()) return wrong;
  std::int64_t keys = 0;
  for (const StoreLayer& l : file.layers()) {
    first_key.push_back(keys);
    keys += l.n_slots();
    where.emplace_back(static_cast<std::size_t>(l.neurons), nullptr);
    last_calls.emplace_back();
    follower.push_back(static_cast<std::int64_t>(follower.size()) + 1);
  }
  follower.back() = -1;
  first_key.push_back(keys);
  if (keys >= std::int64_t{1} << 31) return std::to_string(keys) + " slots, more than a cache can name";
  if (map) {
    void* at =
        mmap(nullptr, static_cast<std::size_t>(file.file_bytes()), PROT_READ, MAP_SHARED, file.plain_descriptor(), 0);
    if (at == MAP_FAILED) return "the file cannot be mapped";
    mapped = static_cast<const char*>(at);
    madvise(at, static_cast<std::size_t>(file.file_bytes()), MADV_RANDOM);
    for (std::size_t k = 0; k < where.size(); ++k) {
      const StoreLayer& l = file.layers()[k];
      for (std::int64_t i = 0; i < l.neurons; ++i)
        where[k][static_cast<std::size_t>(i)] =
            mapped + l.slots + i / l.cluster * l.slot_bytes + i % l.cluster * l.bundle_bytes();
    }
    cache = std::make_unique<NeuronCache>(keys, 0, policy);
    return "";
  }
  wrong = make_places(keys, policy);
  if (!wrong.empty()) return wrong;
  const ReadDone told{[](void* self, const ReadResult* results, std::int64_t count) {
                        static_cast<State*>(self)->arrived(results, count);
                      },
                      this};
  const auto reading = [this, &wrong](ReadDone done) {
    return options.engine == "io_uring" ? uring_engine(file.descriptor(), options.io_threads, done, &wrong)
                                        : pread_engine(file.descriptor(), options.io_threads, done);
  };
  device.set_range(file.file_bytes());
  engine = options.device.empty() ? reading(told) : simulated_engine(device, reading, told, &late);
  if (engine == nullptr && options.engine == "pread") return "engine: no thread could be started for reading";
  if (engine == nullptr) return "engine: io_uring is not available here: " + wrong;
  return "";
}

std::string Offload::State::make_places(std::int64_t keys, CachePolicy policy) {
  std::int64_t per_chunk = 0, per_prompt_chunk = 0;
  for (const StoreLayer& l : file.layers()) {
    const auto slots = [&](std::int64_t neurons) { return (std::min(neurons, l.neurons) + l.cluster - 1) / l.cluster; };
    place_bytes = std::max(place_bytes, rounded(read_bytes(l), 64));
    per_chunk = std::max(per_chunk, slots(chunk_neurons(l.neurons)));
    per_prompt_chunk = std::max(per_prompt_chunk, slots(kPromptNeurons));
  }
  // A chunk at least: then the first that waits always gets on.
  n_spares = std::max(options.in_flight * per_chunk, per_prompt_chunk);
  cache = std::make_unique<NeuronCache>(keys, std::min(keys, options.cache_bytes / place_bytes), policy);
  most_slots = cache->slots();
  const std::int64_t n = most_slots + n_spares;
  if (!places.allocate(n * place_bytes, true))
    return "no memory for a cache of " + std::to_string(n * place_bytes) + " bytes";
  loading.assign(static_cast<std::size_t>(n), 0);
  guess.assign(static_cast<std::size_t>(n), 0);
  dropped.assign(static_cast<std::size_t>(n), 0);
  waiter.assign(static_cast<std::size_t>(n), -1);
  for (std::int64_t p = n - 1; p >= most_slots; --p) free_spares.push_back(static_cast<std::int32_t>(p));
  std::vector<std::int64_t> slots;
  for (const StoreLayer& l : file.layers()) slots.push_back(l.n_slots());
  arrangement.set_up(std::move(slots), std::clamp<std::int64_t>(options.run_bytes / place_bytes, 16, kArrangedAtOnce));
  return "";
}

void Offload::State::expect(std::int64_t n_chunks, bool in_order, bool last) {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [this] { return reading == 0; });  // of the tokens before, if reading has broken
  if (broken) return;
  chunks.assign(static_cast<std::size_t>(n_chunks), Chunk());
  ready.clear();
  waiting.clear();
  given = finished = 0;
  total = n_chunks;
  begun = false;
  stream = in_order;
  last_piece = last;
}

void Offload::State::begin(const std::int64_t* ids, const std::int64_t* counts, std::int64_t chunk_size,
                           std::int64_t n_chunks, const std::uint8_t* keep) {
  try {
    const TraceSpan span(Stage::kBegin, layer, n_chunks);
    std::unique_lock<std::mutex> lock(mutex);
    if (broken) return;
    for (std::int64_t c = 0; c < n_chunks; ++c) {
      Chunk& chunk = chunks[static_cast<std::size_t>(c)];
      chunk.ids = ids + c * chunk_size;
      chunk.count = counts[c];
      sums.wanted += chunk.count;
    }
    keep_anyway = keep;
    follow();
    const std::int64_t hits_before = sums.hits;
    cache->begin();
    // What is there is pinned before room is made for what is not.
    for (std::int64_t c = 0; c < n_chunks; ++c) {
      if (mapped == nullptr) look_up(c);
      const Chunk& chunk = chunks[static_cast<std::size_t>(c)];
      if (!chunk.missing.empty())
        waiting.push_back(c);
      else if (chunk.there())
        ready.push_back(c);
    }
    drop_ahead();  // what nobody wants of it
    if (log != nullptr)
      write_down(sums.hits - hits_before);
    else
      untold = true;
    if (options.window > 0)  // of calls of this layer: experts are not called for every token
      leave_window(cache.get(), &last_calls[static_cast<std::size_t>(layer)], options.window, key_of(layer),
                   key_of(layer + 1));
    tell();
    ask(&lock);
    trace_counter(TraceCounter::kHotBundles, cache->fixed());
    trace_counter(TraceCounter::kColdBundles, cache->used() - cache->fixed());
    begun = true;
    tell();
    read_ahead(&lock);
    wake_arranger();
  } catch (...) {  // a worker's thread: nobody would catch it
    const std::lock_guard<std::mutex> lock(mutex);
    fail(kNoMemory);
  }
  if (then == nullptr || broken) return;
  try {
    (*then)();
  } catch (...) {  // a guess less
  }
}

// With the lock.
void Offload::State::write_down(std::int64_t hits) {
  log->add(layer, about(layer).neurons, stream, about(layer).cluster == 1 ? keep_anyway : nullptr, hits,
           [this](const auto& use) {
             for (const Chunk& chunk : chunks)
               for (std::int64_t k = 0; k < chunk.count; ++k) use(chunk.ids[k]);
           });
}

// With the lock.
void Offload::State::look_up(std::int64_t c) {
  const StoreLayer& l = about(layer);
  std::vector<const char*>& at = where[static_cast<std::size_t>(layer)];
  const std::int64_t key = key_of(layer);
  Chunk& chunk = chunks[static_cast<std::size_t>(c)];
  std::int64_t last = -1, found = -1;
  bool hit = false;
  for (std::int64_t k = 0; k < chunk.count; ++k) {
    const std::int64_t id = chunk.ids[k], in_file = id / l.cluster;
    if (k + kAhead < chunk.count) cache->expect(key + chunk.ids[k + kAhead] / l.cluster);
    if (in_file != last) {
      last = in_file;
      found = cache->look_up(key + in_file);
      hit = found >= 0;
      if (!hit && (found = taken_ahead(in_file, &chunk)) < 0) chunk.missing.push_back(in_file);
      if (hit && guess[static_cast<std::size_t>(found)]) {
        guess[static_cast<std::size_t>(found)] = 0;
        ++sums.used;
        hit = false;
      }
      hit = hit && !loading[static_cast<std::size_t>(found)];
      if (found >= 0 && loading[static_cast<std::size_t>(found)]) {
        waiter[static_cast<std::size_t>(found)] = static_cast<std::int16_t>(c);
        ++chunk.on_the_way;
      }
    }
    if (found >= 0) at[static_cast<std::size_t>(id)] = place(found) + id % l.cluster * l.bundle_bytes();
    sums.hits += hit;
  }
}

// With the lock. There is room: there are never more of them than when all were free.
void Offload::State::free_spare(std::int32_t p) {
  if (loading[static_cast<std::size_t>(p)])
    dropped[static_cast<std::size_t>(p)] = 1;  // it is free when its bytes have come
  else
    free_spares.push_back(p);
}

// With the lock: a call begins; what was read ahead for another than this one is in the way.
void Offload::State::follow() {
  if (!stream || layer != ahead_layer) drop_ahead();
  if (!stream) return;
  if (streamed_last >= 0 && streamed_last < layer) follower[static_cast<std::size_t>(streamed_last)] = layer;
  streamed_last = layer;
  std::int64_t count = 0;
  for (const Chunk& chunk : chunks) count += chunk.count;
  whole = 5 * count > 4 * (about(layer).neurons - first_wanted(layer) * about(layer).cluster);
  if (ahead_layer != layer) return;
  // What was in the cache when it was passed over may have left since, and would wait for room that later chunks have.
  const std::int64_t key = key_of(layer), cluster = about(layer).cluster;
  for (const Chunk& chunk : chunks) {
    for (std::int64_t k = 0; k < chunk.count; ++k) {
      const std::int64_t in_file = chunk.ids[k] / cluster;
      if (in_file >= ahead_next || ahead[static_cast<std::size_t>(in_file)] >= 0 || cache->contains(key + in_file))
        continue;
      return drop_ahead();
    }
  }
}

// With the lock: the spare that this slot of the layer was read into ahead, from now on the chunk's; or -1.
std::int64_t Offload::State::taken_ahead(std::int64_t in_file, Chunk* chunk) {
  if (ahead_layer != layer) return -1;
  const std::int32_t p = ahead[static_cast<std::size_t>(in_file)];
  if (p < 0) return -1;
  chunk->spares.push_back(p);
  if (keeps(about(layer), in_file)) chunk->to_keep.push_back({in_file, p});
  ahead[static_cast<std::size_t>(in_file)] = -1;
  guess[static_cast<std::size_t>(p)] = 0;
  ++sums.used;
  return p;
}

// With the lock.
void Offload::State::drop_ahead() {
  if (ahead_layer < 0) return;
  for (const std::int32_t p : ahead)
    if (p >= 0) free_spare(p);
  ahead_layer = -1;
}

// With the lock, which is given back meanwhile: while a prompt is processed, the layer after this one is read into
// spares that this one has no use for any more.
void Offload::State::read_ahead(std::unique_lock<std::mutex>* lock) {
  while (stream && whole && last_piece && options.pipeline && !broken && waiting.empty()) {
    std::unique_ptr<ReadBatch> batch;
    try {
      batch = take_ahead();
    } catch (const std::bad_alloc&) {  // a guess less
    }
    if (batch == nullptr) return;
    lock->unlock();
    const bool begun_to_read = submit(std::move(batch));
    lock->lock();
    if (!begun_to_read) return;
  }
}

// With the lock: reads of the next slots of the layer after this one; null if there is no room or nothing is left.
std::unique_ptr<ReadBatch> Offload::State::take_ahead() {
  constexpr std::size_t kFewest = 64, kMost = 512;  // slots
  const std::int64_t after = follower[static_cast<std::size_t>(layer)];
  if (after < 0 || free_spares.size() < kFewest) return nullptr;
  const StoreLayer& l = about(after);
  if (ahead_layer != after) {
    drop_ahead();
    ahead.assign(static_cast<std::size_t>(l.n_slots()), -1);
    ahead_layer = after;
    ahead_next = first_wanted(after);
  }
  auto batch = std::make_unique<ReadBatch>();
  batch->layer = after;
  batch->asked_for = false;
  batch->wanted.reserve(kMost);
  for (; ahead_next < l.n_slots() && batch->wanted.size() < kMost && !free_spares.empty(); ++ahead_next) {
    if (cache->contains(key_of(after) + ahead_next)) continue;
    const std::int32_t p = free_spares.back();
    free_spares.pop_back();
    batch->wanted.push_back({ahead_next, p});
  }
  if (batch->wanted.empty()) return nullptr;
  try {
    batch->plan(l, read_bytes(l), options.run_bytes, options.gap_bytes, [this](std::int32_t p) { return place(p); });
  } catch (...) {
    for (const Wanted& w : batch->wanted) free_spares.push_back(w.place);
    throw;
  }
  for (const Wanted& w : batch->wanted) {
    ahead[static_cast<std::size_t>(w.in_file)] = w.place;
    loading[static_cast<std::size_t>(w.place)] = guess[static_cast<std::size_t>(w.place)] = 1;
  }
  sums.guessed += static_cast<std::int64_t>(batch->wanted.size());
  begun_reading(*batch);
  return batch;
}

// With the lock, which is given back meanwhile: begins reads for waiting chunks while there are places.
void Offload::State::ask(std::unique_lock<std::mutex>* lock) {
  while (!waiting.empty() && !broken) {
    std::unique_ptr<ReadBatch> batch = take(waiting.front());
    if (batch == nullptr) {
      if (ahead_layer >= 0) {  // something has to be read again, which is more urgent
        drop_ahead();
        continue;
      }
      // Others may hold every spare when a guess for the one that is to be next has failed.
      const bool stuck = stream ? !chunks[static_cast<std::size_t>(given)].there() : ready.empty();
      if (under_way == 0 && given == finished && stuck) fail({"no room for what has to be read again"});
      return;
    }
    lock->unlock();
    submit(std::move(batch));  // if there is no memory, that has failed this call
    lock->lock();
  }
}

// With the lock: whether a slot that is read gets a place in the cache. What is streamed takes free ones only.
bool Offload::State::keeps(const StoreLayer& l, std::int64_t in_file) const {
  if (!stream || cache->used() < cache->slots() || arrangement.holds(layer, in_file)) return true;
  return keep_anyway != nullptr && l.cluster == 1 && keep_anyway[in_file] != 0;
}

// With the lock: reads of what the first waiting chunk misses, as far as there are places; null if there are none.
std::unique_ptr<ReadBatch> Offload::State::take(std::int64_t c) {
  const StoreLayer& l = about(layer);
  std::vector<const char*>& at = where[static_cast<std::size_t>(layer)];
  Chunk& chunk = chunks[static_cast<std::size_t>(c)];
  auto batch = std::make_unique<ReadBatch>();
  batch->layer = layer;
  batch->chunk = c;
  const std::size_t before = chunk.asked;
  batch->wanted.reserve(chunk.missing.size() - before);
  chunk.spares.reserve(chunk.spares.size() + chunk.missing.size() - before);
  for (; chunk.asked < chunk.missing.size(); ++chunk.asked) {
    const std::int64_t in_file = chunk.missing[chunk.asked];
    // What was to stay may have been read for that meanwhile.
    const bool keep = keeps(l, in_file) && !cache->contains(key_of(layer) + in_file);
    std::int64_t p = keep ? cache->insert(key_of(layer) + in_file, arrangement.holds(layer, in_file)) : -1;
    if (p >= 0) {
      cache->hold(p);
    } else {
      if (free_spares.empty()) break;
      p = free_spares.back();
      free_spares.pop_back();
      chunk.spares.push_back(static_cast<std::int32_t>(p));
      ++sums.uncached;
    }
    loading[static_cast<std::size_t>(p)] = 1;
    waiter[static_cast<std::size_t>(p)] = static_cast<std::int16_t>(c);
    guess[static_cast<std::size_t>(p)] = 0;
    ++chunk.on_the_way;
    batch->wanted.push_back({in_file, static_cast<std::int32_t>(p)});
  }
  if (chunk.asked == chunk.missing.size()) waiting.pop_front();
  if (batch->wanted.empty()) return nullptr;
  std::size_t w = 0;
  for (std::int64_t k = 0; k < chunk.count; ++k) {
    const std::int64_t id = chunk.ids[k], in_file = id / l.cluster;
    while (w < batch->wanted.size() && batch->wanted[w].in_file < in_file) ++w;
    if (w == batch->wanted.size()) break;
    if (batch->wanted[w].in_file == in_file)
      at[static_cast<std::size_t>(id)] = place(batch->wanted[w].place) + id % l.cluster * l.bundle_bytes();
  }
  try {
    batch->plan(l, read_bytes(l), options.run_bytes, options.gap_bytes, [this](std::int32_t p) { return place(p); });
  } catch (...) {
    for (const Wanted& w : batch->wanted) empty_again(layer, w);
    throw;
  }
  begun_reading(*batch);
  trace_counter(TraceCounter::kReading, reading);
  return batch;
}

// Without the lock. False if there is no memory: then nothing of it is read, and its places are empty again.
bool Offload::State::submit(std::unique_ptr<ReadBatch> batch) {
  const auto n = static_cast<std::int64_t>(batch->reads.size());
  std::int64_t bytes = 0;
  for (const Read& read : batch->reads) bytes += read.bytes;
  batch->asked_ns = trace_time();
  try {
    const TraceSpan span(Stage::kSubmit, batch->layer, n);
    engine->submit(batch->reads.data(), n);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (std::int64_t i = 0; i < n; ++i) ended_reading(*batch);
    batch->asked_for = true;  // a call that waits for a guess of it fails, too: nobody would ask again
    for (const ReadRun& run : batch->runs) over(run, kNoMemory);
    tell();
    wake_arranger();
    return false;
  }
  (void)batch.release();  // whoever is told of its last read deletes it, and may have
  const std::lock_guard<std::mutex> lock(mutex);
  sums.reads += n;
  sums.bytes_read += bytes;
  trace_counter(TraceCounter::kBytesRead, sums.bytes_read);
  return true;
}

// With the lock.
void Offload::State::fail(const Wrong& why) noexcept {
  if (!broken) problem = why;
  untold = true;
  broken.store(true, std::memory_order_release);
  tell();
}

Wrong Offload::State::check_bundles(std::int64_t l, std::int64_t in_file, const char* data) const noexcept {
  const StoreLayer& its = about(l);
  const std::int64_t first = in_file * its.cluster;
  for (std::int64_t id = first; id < std::min(first + its.cluster, its.neurons); ++id)
    if (crc32c(data + (id - first) * its.bundle_bytes(), static_cast<std::size_t>(its.bundle_bytes())) !=
        file.checks(l)[id])
      return {"its checksum does not match", 0, l, id, 0, its.slots + in_file * its.slot_bytes};
  return {};
}

// Without the lock: nobody looks at these places before they are said to be there.
Wrong Offload::State::check(const ReadRun& run, const ReadResult& result) const noexcept {
  const ReadBatch& batch = *run.batch;
  trace_async(Stage::kRead, batch.asked_ns, batch.layer, batch.chunk);
  const TraceSpan span(Stage::kVerify, batch.layer, batch.chunk);
  const Wanted* wanted = batch.wanted.data() + run.first;
  if (result.error != 0)
    return {nullptr,           result.error,      batch.layer, wanted->in_file * about(batch.layer).cluster,
            result.read.bytes, result.read.offset};
  if (!options.verify) return {};
  for (std::int64_t k = 0; k < run.count; ++k) {
    const Wrong wrong = check_bundles(batch.layer, wanted[k].in_file, place(wanted[k].place));
    if (wrong) return wrong;
  }
  return {};
}

// On an I/O thread, where nobody would catch anything: what needs memory fails the call that waits.
void Offload::State::arrived(const ReadResult* results, std::int64_t count) noexcept {
  Wrong wrong[64];
  for (std::int64_t first = 0; first < count; first += 64) {
    const std::int64_t n = std::min<std::int64_t>(64, count - first);
    for (std::int64_t i = 0; i < n; ++i)
      wrong[i] = check(*static_cast<const ReadRun*>(results[first + i].read.owner), results[first + i]);
    std::unique_lock<std::mutex> lock(mutex);
    const std::size_t ready_before = ready.size();
    const bool was_reading = reading > 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const ReadRun& run = *static_cast<const ReadRun*>(results[first + i].read.owner);
      ReadBatch* const batch = run.batch;
      ended_reading(*batch);
      over(run, wrong[i]);
      if (--batch->left == 0) delete batch;
    }
    trace_counter(TraceCounter::kReading, reading);
    // Workers are woken for a chunk, not for each of its hundreds of bundles.
    if (ready.size() != ready_before || (was_reading && reading == 0) || under_way == 0 || broken) tell();
    wake_arranger();
    if (waiting.empty() || !begun) continue;  // begin() asks
    try {
      ask(&lock);  // for guesses that failed
    } catch (...) {
      fail(kNoMemory);
    }
  }
}

// With the lock: nothing is in this place, nor on its way there.
void Offload::State::empty_again(std::int64_t l, const Wanted& wanted) {
  const auto p = static_cast<std::size_t>(wanted.place);
  loading[p] = guess[p] = 0;
  waiter[p] = -1;
  const std::int64_t key = key_of(l) + wanted.in_file;
  if (cache->slot_of(key) == wanted.place) cache->erase(key);
  if (ahead_layer == l && ahead[static_cast<std::size_t>(wanted.in_file)] == wanted.place) {
    ahead[static_cast<std::size_t>(wanted.in_file)] = -1;
    free_spares.push_back(wanted.place);
  }
}

// With the lock: the places of a read are there, or empty if something is wrong.
void Offload::State::over(const ReadRun& run, const Wrong& wrong) noexcept {
  const Wanted* wanted = run.batch->wanted.data() + run.first;
  if (run.batch->arranging) arranging -= run.count;
  untold = untold || (run.batch->arranging && wrong);
  for (std::int64_t k = 0; k < run.count; ++k) {
    const auto p = static_cast<std::size_t>(wanted[k].place);
    loading[p] = 0;
    if (wanted[k].place < cache->slots()) cache->let_go(wanted[k].place);
    const std::int16_t c = waiter[p];
    if (wrong) empty_again(run.batch->layer, wanted[k]);
    if (dropped[p]) {
      dropped[p] = 0;
      free_spares.push_back(wanted[k].place);
      continue;
    }
    if (c < 0) continue;
    waiter[p] = -1;
    Chunk& chunk = chunks[static_cast<std::size_t>(c)];
    --chunk.on_the_way;
    if (wrong && !run.batch->asked_for && wanted[k].place >= most_slots) {  // it is read again elsewhere
      chunk.spares.erase(std::find(chunk.spares.begin(), chunk.spares.end(), wanted[k].place));
      free_spares.push_back(wanted[k].place);
      const auto kept = std::find_if(chunk.to_keep.begin(), chunk.to_keep.end(),
                                     [&](const Wanted& w) { return w.place == wanted[k].place; });
      if (kept != chunk.to_keep.end()) chunk.to_keep.erase(kept);
    }
    if (wrong && (run.batch->asked_for || broken || !missed(c, wanted[k].in_file))) fail(wrong);
    if (!chunk.there()) continue;
    try {
      ready.push_back(c);
    } catch (...) {
      fail(kNoMemory);
    }
  }
}

// With the lock: a guess that a chunk waits for has failed, and the chunk asks for itself. False if there is no memory.
bool Offload::State::missed(std::int64_t c, std::int64_t in_file) {
  Chunk& chunk = chunks[static_cast<std::size_t>(c)];
  try {
    chunk.missing.push_back(in_file);
    std::sort(chunk.missing.begin() + static_cast<std::ptrdiff_t>(chunk.asked), chunk.missing.end());
    // In order: chunks of a stream come in theirs, and of others the first is the one that always gets on.
    const auto at = std::lower_bound(waiting.begin(), waiting.end(), c);
    if (at == waiting.end() || *at != c) waiting.insert(at, c);
  } catch (...) {
    return false;
  }
  return true;
}

std::int64_t Offload::State::next() {
  std::unique_lock<std::mutex> lock(mutex);
  const auto stop = [this] { return broken || given == total; };
  // Without the pipeline, when all reads are over; chunks that wait for spares of those that are there do not count.
  const auto may_begin = [this] {
    const bool one = stream ? begun && chunks[static_cast<std::size_t>(given)].there() : !ready.empty();
    return one && (options.pipeline || (begun && reading == 0));
  };
  if (!stop() && !may_begin()) {
    const TraceSpan span(Stage::kWait, layer);
    const Clock::time_point start = Clock::now();
    const Clock::time_point give_up = start + (options.spin ? kSpin : std::chrono::milliseconds(0));
    while (!stop() && !may_begin()) {
      const std::uint64_t seen = news.load();
      if (Clock::now() >= give_up) {
        changed.wait(lock, [&] { return stop() || may_begin(); });
        break;
      }
      lock.unlock();
      while (news.load(std::memory_order_relaxed) == seen && Clock::now() < give_up) std::this_thread::yield();
      lock.lock();
    }
    sums.wait_ns += since(start);
  }
  if (stop()) return -1;
  const std::int64_t c = stream ? given : ready.front();
  if (!stream) ready.pop_front();
  if (++given == total) tell();
  return c;
}

void Offload::State::done(std::int64_t c) {
  std::unique_lock<std::mutex> lock(mutex);
  Chunk& chunk = chunks[static_cast<std::size_t>(c)];
  ++finished;
  if (chunk.spares.empty() && !stream) return;
  for (const Wanted& w : chunk.to_keep) {
    if (cache->contains(key_of(layer) + w.in_file)) continue;  // it was to stay, and was read for that meanwhile
    const std::int64_t p = cache->insert(key_of(layer) + w.in_file, arrangement.holds(layer, w.in_file));
    if (p < 0) break;
    guess[static_cast<std::size_t>(p)] = 0;
    std::memcpy(place(p), place(w.place), static_cast<std::size_t>(place_bytes));
    untold = true;  // a replay would have it in the cache before
  }
  chunk.to_keep.clear();
  free_spares.insert(free_spares.end(), chunk.spares.begin(), chunk.spares.end());
  chunk.spares.clear();
  try {
    ask(&lock);
    read_ahead(&lock);
    wake_arranger();
  } catch (...) {
    fail(kNoMemory);
  }
}

std::unique_lock<std::mutex> Offload::State::take_turn() {
  const std::lock_guard<std::mutex> first(door);
  return std::unique_lock<std::mutex>(turn);
}

std::string Offload::State::call(std::int64_t l, const std::function<void(BundleSource*)>& compute, int threads) {
  if (getpid() != process) return kForked;
  // Of what is mapped the system would say so by a signal: as it does if that happens during this call.
  if (mapped != nullptr && file.is_shorter()) return kShorter;
  const std::unique_lock<std::mutex> one = take_turn();
  const Clock::time_point start = Clock::now();
  {
    const std::lock_guard<std::mutex> lock(mutex);
    calling = true;
    layer = l;
    broken = false;
    problem = {};
    chunks.clear();
    given = finished = total = 0;
  }
  try {
    compute(this);
  } catch (...) {  // no memory: what was asked for must not be taken for read
    std::unique_lock<std::mutex> lock(mutex);
    broken = true;
    clean_up(&lock);
    throw;
  }
  std::unique_lock<std::mutex> lock(mutex);
  clean_up(&lock);
  ++sums.calls;
  sums.busy_ns += since(start) * threads;
  return broken ? problem.words() : "";
}

// With the lock, at the end of a call: no read of it is under way any more, and nothing remembers its chunks.
void Offload::State::clean_up(std::unique_lock<std::mutex>* lock) {
  changed.wait(*lock, [this] { return reading == 0; });
  calling = false;
  if (broken) {
    waiting.clear();
    std::fill(waiter.begin(), waiter.end(), -1);  // of guesses, which may still be on their way
    for (Chunk& chunk : chunks) {
      for (const std::int32_t p : chunk.spares) free_spare(p);
      chunk.spares.clear();
    }
  }
  wake_arranger();
}

void Offload::State::prefetch(std::int64_t l, std::int64_t n_hot, const std::uint8_t* active, std::int64_t tokens) {
  if (mapped != nullptr || getpid() != process) return;
  const StoreLayer& layer_about = about(l);
  const std::int64_t cold = layer_about.neurons - n_hot;
  const auto wanted = [&](std::int64_t id) {
    if (id < n_hot || active == nullptr) return true;
    for (std::int64_t t = 0; t < tokens; ++t)
      if (active[t * cold + id - n_hot]) return true;
    return false;
  };
  std::unique_ptr<ReadBatch> batch;
  try {
    std::vector<std::int64_t> slots;  // of the file
    for (std::int64_t id = 0; id < layer_about.neurons; ++id) {
      if (!wanted(id)) continue;
      slots.push_back(id / layer_about.cluster);
      id = (slots.back() + 1) * layer_about.cluster - 1;  // the rest of the slot comes with it
    }
    batch = std::make_unique<ReadBatch>();
    batch->wanted.reserve(slots.size());
    batch->layer = l;
    batch->asked_for = false;
    const std::lock_guard<std::mutex> lock(mutex);
    // A call has looked up what this layer wants, and is about to make room for what it misses.
    if (l == layer && !waiting.empty()) return;
    untold = true;
    // What is there is used by this, so that room is not made of it.
    const std::int64_t key = key_of(l);
    slots.erase(
        std::remove_if(slots.begin(), slots.end(), [&](std::int64_t s) { return cache->look_up(key + s) >= 0; }),
        slots.end());
    for (const std::int64_t in_file : slots) {
      const std::int64_t p = cache->insert(key + in_file, arrangement.holds(l, in_file));
      if (p < 0) break;  // full of what is needed more
      batch->wanted.push_back({in_file, static_cast<std::int32_t>(p)});
      cache->hold(p);
      loading[static_cast<std::size_t>(p)] = guess[static_cast<std::size_t>(p)] = 1;
    }
    try {
      batch->plan(layer_about, read_bytes(layer_about), options.run_bytes, options.gap_bytes,
                  [this](std::int32_t p) { return place(p); });
    } catch (...) {
      for (const Wanted& w : batch->wanted) empty_again(l, w);
      throw;
    }
    sums.guessed += static_cast<std::int64_t>(batch->wanted.size());
    begun_reading(*batch);
  } catch (const std::bad_alloc&) {
    return;
  }
  if (!batch->wanted.empty()) submit(std::move(batch));  // if that fails, they are asked for when they are wanted
}

// Neurons of every layer from the first on, as many as there are places in the cache: first those that are to stay.
std::string Offload::State::preload() {
  if (getpid() != process) return kForked;
  const std::unique_lock<std::mutex> one = take_turn();
  const std::lock_guard<std::mutex> lock(mutex);
  if (mapped != nullptr) return "";
  untold = untold || log != nullptr || !left_out.empty();
  // Whatever ends this early, nothing of it may be taken for loaded.
  const std::vector<std::int64_t> hot =
      resident.empty() ? hot_counts(first_key, cache->slots(), options.hot_share, left_out) : arrangement.counts();
  const std::vector<std::int64_t> made = insert_first(cache.get(), first_key, hot, true, left_out);
  for (std::int64_t l = 0; l < static_cast<std::int64_t>(hot.size()); ++l)
    arrangement.may_be_fixed(static_cast<std::size_t>(l), first_wanted(l) + hot[static_cast<std::size_t>(l)]);
  const auto forget = [&] {
    for (const std::int64_t key : made) cache->erase(key);
    untold = true;
  };
  try {
    const Wrong wrong = load_first(made);
    if (wrong) forget();
    preloaded = preloaded || !wrong;
    if (!resident.empty()) settled = false;
    wake_arranger();
    return wrong.words();
  } catch (...) {
    forget();
    throw;
  }
}

// With the lock: reads the bundles of keys that the cache has made room for, in large pieces.
Wrong Offload::State::load_first(std::vector<std::int64_t> made) {
  std::sort(made.begin(), made.end());
  for (const std::int64_t key : made) guess[static_cast<std::size_t>(cache->slot_of(key))] = 0;
  std::int64_t largest = 0;
  for (const StoreLayer& l : file.layers()) largest = std::max(largest, l.slot_bytes);
  Arena piece;
  if (!piece.allocate(std::max(kPieceBytes, largest), false)) return kNoMemory;
  auto next = made.begin();
  for (std::size_t k = 0; k < file.layers().size(); ++k) {
    const StoreLayer& l = file.layers()[k];
    const std::int64_t step = std::max<std::int64_t>(1, kPieceBytes / l.slot_bytes);
    while (next != made.end() && *next < first_key[k + 1]) {
      const std::int64_t first = *next - first_key[k];
      const auto end = std::lower_bound(next, made.end(), std::min(*next + step, first_key[k + 1]));
      const std::int64_t n = *(end - 1) - *next + 1, offset = l.slots + first * l.slot_bytes;
      const int error = read_fully(file.descriptor(), piece.data(), n * l.slot_bytes, offset);
      const auto layer_number = static_cast<std::int64_t>(k);
      if (error != 0) return {nullptr, error, layer_number, first * l.cluster, n * l.slot_bytes, offset};
      for (; next != end; ++next) {
        const std::int64_t in_file = *next - first_key[k];
        const char* slot = piece.data() + (in_file - first) * l.slot_bytes;
        const Wrong wrong = options.verify ? check_bundles(layer_number, in_file, slot) : Wrong();
        if (wrong) return wrong;
        // Not a use: the order is that of insertion.
        std::memcpy(place(cache->slot_of(*next)), slot, static_cast<std::size_t>(l.cluster * l.bundle_bytes()));
      }
    }
  }
  return {};
}

// With the lock.
std::string Offload::State::refused_size(std::int64_t cache_bytes) const {
  if (cache_bytes >= 0 && slots_for(cache_bytes) <= most_slots) return "";
  return "cache_bytes: expected 0 to " + std::to_string(most_slots * place_bytes) +
         ", with which it was opened, found " + std::to_string(cache_bytes);
}

std::int64_t Offload::State::slots_for(std::int64_t cache_bytes) const {
  return options.policy == "none" ? 0 : std::min(first_key.back(), cache_bytes / place_bytes);
}

// With the turn and the lock, while nothing is read: what it is read into may move.
void Offload::State::change_size(std::int64_t slots) {
  try {
    if (resident.empty()) {
      release_hot(cache.get(), first_key, slots, options.hot_share, left_out);
    } else {
      rearrange(slots);
      Arrangement::Piece piece;
      while (arrangement.next(&piece) && piece.release) release(piece);
    }
    const std::int64_t before = cache->slots();
    for (const NeuronCache::Move& move : cache->resize(slots)) {
      std::memcpy(place(move.to), place(move.from), static_cast<std::size_t>(place_bytes));
      guess[static_cast<std::size_t>(move.to)] = guess[static_cast<std::size_t>(move.from)];
    }
    places.give_back(cache->slots() * place_bytes, before * place_bytes);
  } catch (...) {
    if (!resident.empty()) rearrange(cache->slots());
    throw;
  }
}

namespace {

// As long as this lives, `paused` is larger by `amount`; the lock is held when it begins and when it ends.
class Pause {
 public:
  Pause(int* paused, int amount) : paused_(paused), amount_(amount) { *paused_ += amount_; }
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;
  ~Pause() { *paused_ -= amount_; }

 private:
  int* paused_;
  int amount_;
};

}  // namespace

std::string Offload::State::resize(std::int64_t cache_bytes, double hot_share) {
  if (getpid() != process) return kForked;
  if (mapped != nullptr) return kMapped;
  const std::unique_lock<std::mutex> one = take_turn();
  std::unique_lock<std::mutex> lock(mutex);
  const std::string wrong = refused_size(cache_bytes);
  if (!wrong.empty()) return wrong;
  if (!(hot_share >= 0 && hot_share <= 1)) return "hot_share: expected 0 to 1, found " + std::to_string(hot_share);
  {
    const Pause pause(&paused, 1);
    changed.wait(lock, [this] { return under_way == 0; });
    options.hot_share = hot_share;
    untold = true;
    change_size(slots_for(cache_bytes));
  }
  wake_arranger();
  return "";
}

std::string Offload::State::arrange(const std::vector<std::int64_t>& neurons, std::int64_t cache_bytes) {
  if (getpid() != process) return kForked;
  if (mapped != nullptr) return kMapped;
  const std::vector<StoreLayer>& layers = file.layers();
  if (neurons.size() != layers.size())
    return "resident: expected " + std::to_string(layers.size()) + " numbers, one of each layer, found " +
           std::to_string(neurons.size());
  for (std::size_t l = 0; l < layers.size(); ++l)
    if (neurons[l] < 0 || neurons[l] > layers[l].neurons)
      return "resident: expected 0 to " + std::to_string(layers[l].neurons) + " neurons of layer " + std::to_string(l) +
             ", found " + std::to_string(neurons[l]);
  std::vector<std::int64_t> wanted = neurons;
  std::unique_lock<std::mutex> lock(mutex);
  std::unique_lock<std::mutex> one;
  if (cache_bytes != kSameSize) {
    const std::string wrong = refused_size(cache_bytes);
    if (!wrong.empty()) return wrong;
    if (slots_for(cache_bytes) != cache->slots()) {  // between two calls
      lock.unlock();
      one = take_turn();
      lock.lock();
    }
  }
  if (!arranger.joinable()) {
    try {
      arranger = std::thread([this] { run_arranger(); });
    } catch (const std::system_error&) {
      return "no thread could be started for reading";
    }
  }
  {
    const bool sized = one.owns_lock();
    const Pause pause(&paused, sized ? 1 : 0);
    if (sized) changed.wait(lock, [this] { return under_way == 0; });
    untold = untold || log != nullptr;
    resident.swap(wanted);
    try {
      if (sized)
        change_size(slots_for(cache_bytes));
      else
        rearrange(cache->slots());
    } catch (...) {
      resident.swap(wanted);
      if (!resident.empty()) rearrange(cache->slots());
      throw;
    }
  }
  wake_arranger();
  return "";
}

void Offload::State::leave_out(const std::vector<std::int64_t>& first) {
  if (getpid() != process) return;
  const std::unique_lock<std::mutex> one = take_turn();
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<std::int64_t> slots;
  for (std::size_t l = 0; l < file.layers().size(); ++l) slots.push_back(first[l] / file.layers()[l].cluster);
  left_out = std::move(slots);
  if (!resident.empty()) rearrange(cache->slots());
  wake_arranger();
}

// With the lock: what is to stay in a cache of so many slots, from now on.
void Offload::State::rearrange(std::int64_t slots) {
  std::vector<std::int64_t> begin, count;
  for (std::size_t l = 0; l < resident.size(); ++l) {
    const StoreLayer& its = file.layers()[l];
    begin.push_back(first_wanted(static_cast<std::int64_t>(l)));
    count.push_back(std::min(its.n_slots() - begin.back(), (resident[l] + its.cluster - 1) / its.cluster));
  }
  arrangement.set(std::move(begin), fitting(std::move(count), slots));
  settled = blocked = false;
}

// With the lock: something has changed that may have been in the way.
void Offload::State::wake_arranger() {
  blocked = false;
  if (!settled && may_arrange()) work.notify_one();
}

// With the lock. Calls come first: while one waits for what no read was begun of, nothing else is begun, and while it
// waits for reads, one at a time.
bool Offload::State::may_arrange() const {
  if (settled || blocked || paused > 0 || !waiting.empty()) return false;
  if (!arrangement.pending()) return arranging == 0;
  return arranging == 0 || (reading == 0 && arranging * place_bytes < kArrangingBytes);
}

void Offload::State::run_arranger() {
  trace_io_thread();
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    work.wait(lock, [this] { return ending || may_arrange(); });
    if (ending) return;
    if (!arrangement.pending()) {
      settle();
      continue;
    }
    std::unique_ptr<ReadBatch> batch = arrange_some();
    lock.unlock();
    if (batch != nullptr)
      submit(std::move(batch));  // if that fails, they are asked for when they are wanted
    else
      std::this_thread::sleep_for(std::chrono::microseconds(20));  // calls that wait for the lock get it
    lock.lock();
  }
}

// With the lock: a few steps, and the reads that they take, if any.
std::unique_ptr<ReadBatch> Offload::State::arrange_some() {
  std::unique_ptr<ReadBatch> batch;
  Arrangement::Piece piece;
  for (std::int64_t seen = 0; seen < kArrangedAtOnce && batch == nullptr && !blocked && arrangement.next(&piece);) {
    seen += piece.last - piece.first;
    if (piece.release)
      release(piece);
    else
      batch = bring(piece);
  }
  return batch;
}

// With the lock.
void Offload::State::release(const Arrangement::Piece& piece) {
  for (std::int64_t in_file = piece.last - 1; in_file >= piece.first; --in_file)
    if (!arrangement.holds(piece.layer, in_file)) cache->fix(key_of(piece.layer) + in_file, false);
  arrangement.done(piece, piece.last);
}

// With the lock: slots of a piece are fixed that are there; reads of the others, or null.
std::unique_ptr<ReadBatch> Offload::State::bring(const Arrangement::Piece& piece) {
  const StoreLayer& l = about(piece.layer);
  const std::int64_t key = key_of(piece.layer);
  std::unique_ptr<ReadBatch> batch;
  std::int64_t in_file = piece.first;
  try {
    for (; in_file < piece.last; ++in_file) {
      if (cache->contains(key + in_file)) {
        cache->fix(key + in_file, true);
        continue;
      }
      if (batch == nullptr) {
        auto made = std::make_unique<ReadBatch>();
        made->wanted.reserve(static_cast<std::size_t>(piece.last - in_file));
        batch = std::move(made);
        batch->layer = piece.layer;
        batch->asked_for = false;
        batch->arranging = true;
      }
      std::int64_t p = cache->insert(key + in_file, true);
      if (p < 0 && !calling) {
        cache->begin();  // what the last call has used is pinned no more
        p = cache->insert(key + in_file, true);
      }
      if (p < 0 && (calling || under_way > 0 || !batch->wanted.empty())) {
        blocked = true;
        break;
      }
      if (p < 0) {
        untold = true;
        continue;
      }
      cache->hold(p);
      loading[static_cast<std::size_t>(p)] = 1;
      guess[static_cast<std::size_t>(p)] = 0;
      batch->wanted.push_back({in_file, static_cast<std::int32_t>(p)});
    }
    arrangement.done(piece, in_file);
    if (batch == nullptr || batch->wanted.empty()) return nullptr;
    batch->plan(l, read_bytes(l), options.run_bytes, options.gap_bytes, [this](std::int32_t p) { return place(p); });
  } catch (...) {  // they are asked for when they are wanted
    if (batch == nullptr) arrangement.done(piece, piece.last);
    if (batch != nullptr)
      for (const Wanted& w : batch->wanted) empty_again(piece.layer, w);
    untold = true;
    return nullptr;
  }
  arranging += static_cast<std::int64_t>(batch->wanted.size());
  begun_reading(*batch);
  return batch;
}

// With the lock: all is there. If nobody has used the cache yet, it becomes what a replay begins with.
void Offload::State::settle() {
  settled = true;
  if (untold) return;
  try {
    std::vector<std::int64_t> keys = filling(first_key, cache->slots(), arrangement.counts(), preloaded, left_out);
    std::vector<std::uint8_t> stays(static_cast<std::size_t>(first_key.back()), 0);
    for (const std::int64_t key : keys) stays[static_cast<std::size_t>(key)] = cache->contains(key) ? 1 : 2;
    const auto missing = static_cast<std::int64_t>(std::count(stays.begin(), stays.end(), 2));
    // Sizes before may have left a few for which shares of the cache round to less now.
    if (missing > 0 ||
        cache->used() - static_cast<std::int64_t>(keys.size()) > static_cast<std::int64_t>(file.layers().size()))
      untold = true;
    if (untold) return;
    for (std::size_t key = 0; key < stays.size(); ++key)
      if (stays[key] == 0) cache->erase(static_cast<std::int64_t>(key));
    std::reverse(keys.begin(), keys.end());
    cache->renew(keys);
  } catch (...) {
    untold = true;
  }
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

std::string Offload::ffn(std::int64_t layer, const Predictor& predictor, FfnArgs args, const ParallelFor& parallel,
                         const std::function<void()>& then) {
  return state_->call(
      layer,
      [&](BundleSource* source) {
        state_->then = then ? &then : nullptr;
        args.source = source;
        args.layer = layer;
        args.owner = this;
        predicted_ffn(predictor, args, parallel);
      },
      std::max(1, parallel.threads));
}

void Offload::prefetch(std::int64_t layer, std::int64_t n_hot, const std::uint8_t* active, std::int64_t tokens) {
  state_->prefetch(layer, n_hot, active, tokens);
}

void Offload::leave_out(const std::vector<std::int64_t>& first) { state_->leave_out(first); }

std::string Offload::preload() { return state_->preload(); }

std::string Offload::resize(std::int64_t cache_bytes, double hot_share) {
  return state_->resize(cache_bytes, hot_share);
}

std::string Offload::arrange(const std::vector<std::int64_t>& resident, std::int64_t cache_bytes) {
  return state_->arrange(resident, cache_bytes);
}

std::string Offload::record_accesses(std::int64_t most_bytes) {
  if (state_->process != getpid()) return kForked;
  auto log = std::make_unique<AccessLog>(most_bytes);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->log != nullptr) return "accesses are being recorded already";
  state_->log = std::move(log);
  state_->untold = state_->untold || !state_->settled;
  return "";
}

Accesses Offload::take_accesses() {
  if (state_->process != getpid()) return Accesses();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->log == nullptr) return Accesses();
  Accesses all = state_->log->take();
  all.whole = !state_->untold && all.lost == 0;
  state_->untold = state_->untold || !all.layers.empty() || all.lost > 0;  // the next recording has not these
  state_->log.reset();
  return all;
}

OffloadStats Offload::stats(bool reset) {
  if (state_->process != getpid()) return OffloadStats();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->under_way > 0) {  // reads outlive calls
    state_->sums.io_ns += since(state_->io_since);
    state_->io_since = Clock::now();
  }
  OffloadStats stats = state_->sums;
  stats.evictions = state_->cache->evictions() - state_->evictions_before;
  stats.resident = state_->cache->used();
  stats.slots = state_->cache->slots();
  stats.fixed = state_->cache->fixed();
  if (!state_->settled) stats.arranging = std::max<std::int64_t>(1, state_->arrangement.left() + state_->arranging);
  stats.cache_bytes = stats.slots * state_->place_bytes;
  stats.staging_bytes = state_->n_spares * state_->place_bytes;
  stats.late = reset ? state_->late.exchange(0) : state_->late.load();
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
