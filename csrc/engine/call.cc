#include "engine/call.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>

#include "base/trace.h"
#include "cache/cache_use.h"

namespace pi2 {
namespace {

constexpr std::int64_t kAhead = 16;  // neurons between one that is looked up and one that is going to be
// A worker that sleeps is often woken on a core where another one spins in OpenMP's barrier: on two cores a 7B model
// decodes 1.4 times as fast if workers give way instead of sleeping for as long as a layer's reads take.
constexpr std::chrono::milliseconds kSpin{4};

}  // namespace

void Call::set_up() {
  const Layout& layout = common_.layout;
  last_calls_.resize(static_cast<std::size_t>(layout.count()));
  rest_.resize(static_cast<std::size_t>(layout.count()));
  for (const StoreLayer& l : layout.layers()) {
    where_.emplace_back(static_cast<std::size_t>(l.neurons), nullptr);
    for (std::int64_t i = 0; layout.mapped() != nullptr && i < l.neurons; ++i)
      where_.back()[static_cast<std::size_t>(i)] =
          layout.mapped() + l.slots + i / l.cluster * l.slot_bytes + i % l.cluster * l.neuron_bytes();
  }
}

void Call::start(std::int64_t layer) {
  calling_ = true;
  layer_ = layer;
  broken_ = false;
  problem_ = {};
  stats_ = {};
  chunks_.forget();
}

void Call::count(std::int64_t CallStats::* what, std::int64_t n) {
  stats_.*what += n;
  common_.sums.*what += n;
}

void Call::add_to(CallStats* stats) const {
  for (std::int64_t CallStats::* const what :
       {&CallStats::wanted, &CallStats::hits, &CallStats::reads, &CallStats::bytes_read, &CallStats::wait_ns})
    stats->*what += stats_.*what;
}

void Call::end() {
  while (reads_.asked_for() > 0) common_.mutex.wait_for_news();
  calling_ = false;
  if (!broken_) return;
  chunks_.waiting.clear();
  common_.places.nobody_waits();  // for guesses, which may still be on their way
  for (Chunk& chunk : chunks_.all) {
    for (const std::int32_t spare : chunk.spares) common_.places.drop(spare);
    chunk.spares.clear();
  }
}

void Call::abandon() {
  broken_ = true;
  end();
}

void Call::fail(const Wrong& why) noexcept {
  if (!broken_) problem_ = why;
  common_.recording.lose();
  broken_.store(true, std::memory_order_release);
  common_.mutex.tell();
}

void Call::leave_out_missing(std::uint8_t* active, std::int64_t tokens, std::int64_t n_hot) {
  const StoreLayer& l = about();
  const NeuronCache& cache = common_.places.cache();
  const std::int64_t cold = l.neurons - n_hot;
  for (std::int64_t i = 0; i < cold; ++i) {
    bool doubt = false, sure = false;
    for (std::int64_t t = 0; t < tokens; ++t) {
      doubt = doubt || active[t * cold + i] == kIfThere;
      sure = sure || active[t * cold + i] == 1;
    }
    if (!doubt) continue;
    const bool there = sure || cache.contains(key() + (n_hot + i) / l.cluster);
    for (std::int64_t t = 0; t < tokens; ++t)
      if (active[t * cold + i] == kIfThere) active[t * cold + i] = there ? 1 : 0;
    // Slots before the first that is wanted here are somebody else's, who computes them.
    if (!there && (n_hot + i) / l.cluster >= residents_.first_wanted(layer_)) ++common_.sums.left_out;
  }
}

void Call::expect(std::int64_t n_chunks, bool stream, bool last) {
  while (reads_.asked_for() > 0) common_.mutex.wait_for_news();  // of the tokens before, if reading has broken
  if (broken_) return;
  chunks_.expect(n_chunks);
  begun_ = false;
  stream_ = stream;
  last_piece_ = last;
}

void Call::begin(const std::int64_t* ids, const std::int64_t* counts, std::int64_t chunk_size,
                 const std::uint8_t* keep) {
  if (broken_) return;
  const std::int64_t n_chunks = chunks_.total;
  for (std::int64_t c = 0; c < n_chunks; ++c) {
    chunks_[c].ids = ids + c * chunk_size;
    chunks_[c].count = counts[c];
    count(&CallStats::wanted, counts[c]);
  }
  keep_anyway_ = keep;
  ahead_.follow(layer_, stream_, chunks_);
  const std::int64_t hits_before = common_.sums.hits;
  NeuronCache& cache = common_.places.cache();
  cache.begin();
  const bool known = common_.layout.mapped() != nullptr, resting = !known && rests();
  // What is there is pinned before room is made for what is not.
  for (std::int64_t c = 0; c < n_chunks; ++c) {
    if (resting)
      count(&CallStats::hits, chunks_[c].count);
    else if (!known)
      look_up(c);
    if (!chunks_[c].missing.empty())
      chunks_.waiting.push_back(c);
    else if (chunks_[c].there())
      chunks_.ready.push_back(c);
  }
  ahead_.drop();  // what nobody wants of it
  note_uses(common_.sums.hits - hits_before);
  if (common_.options.window > 0)  // of calls of this layer: experts are not called for every token
    leave_window(&cache, &last_calls_[static_cast<std::size_t>(layer_)], common_.options.window, key(),
                 common_.layout.key_of(layer_ + 1));
  common_.mutex.tell();
  ask();
  trace_counter(TraceCounter::kHotNeurons, cache.fixed());
  trace_counter(TraceCounter::kColdNeurons, cache.used() - cache.fixed());
  begun_ = true;
  common_.mutex.tell();
  read_ahead();
}

void Call::note_uses(std::int64_t hits) {
  if (!common_.recording.on()) return common_.recording.lose();
  const std::uint8_t* kept = about().cluster == 1 ? keep_anyway_ : nullptr;
  const std::vector<Chunk>& chunks = chunks_.all;
  common_.recording.log().add(layer_, about().neurons, stream_, kept, hits, [&](const auto& use) {
    for (const Chunk& chunk : chunks)
      for (std::int64_t k = 0; k < chunk.count; ++k) use(chunk.ids[k]);
  });
}

// Whether the layer's neurons are all there, in places that they keep: a cache that has every key evicts nothing, and
// looking each of them up costs as much as a tenth of what is computed with them. Until a neuron moves, where_ has
// them.
bool Call::rests() {
  Places& places = common_.places;
  const NeuronCache& cache = places.cache();
  if (cache.used() < cache.keys() || common_.options.window > 0 || common_.recording.on()) return false;
  Rest& rest = rest_[static_cast<std::size_t>(layer_)];
  if (rest.changes == cache.changes()) return rest.whole;
  if (reads_.under_way() > 0) return false;
  rest = {cache.changes(), true};
  const StoreLayer& l = about();
  const char** at = where_[static_cast<std::size_t>(layer_)].data();
  for (std::int64_t id = 0; id < l.neurons; ++id) {
    const std::int64_t place = cache.slot_of(key() + id / l.cluster);
    rest.whole = rest.whole && !places.guessed(place);  // what is wanted of guesses is counted
    at[id] = places.at(place) + id % l.cluster * l.neuron_bytes();
  }
  return rest.whole;
}

void Call::look_up(std::int64_t c) {
  const StoreLayer& l = about();
  Places& places = common_.places;
  NeuronCache& cache = places.cache();
  const char** at = where_[static_cast<std::size_t>(layer_)].data();
  const std::int64_t first_key = key();
  Chunk& chunk = chunks_[c];
  std::int64_t last = -1, found = -1, hits = 0;
  bool hit = false;
  for (std::int64_t k = 0; k < chunk.count; ++k) {
    const std::int64_t id = chunk.ids[k], in_file = id / l.cluster;
    if (k + kAhead < chunk.count) cache.expect(first_key + chunk.ids[k + kAhead] / l.cluster);
    if (in_file != last) {
      last = in_file;
      found = cache.look_up(first_key + in_file);
      hit = found >= 0;
      if (!hit && (found = take_ahead(in_file, &chunk)) < 0) chunk.missing.push_back(in_file);
      if (hit && places.guessed(found)) {
        places.wanted(found);
        ++common_.sums.used;
        hit = false;
      }
      if (found >= 0 && places.loading(found)) {
        places.wait_for(found, c);
        ++chunk.on_the_way;
        hit = false;
      }
    }
    if (found >= 0) at[id] = places.at(found) + id % l.cluster * l.neuron_bytes();
    hits += hit;
  }
  count(&CallStats::hits, hits);
}

// The spare that this slot of the layer was read into ahead, from now on the chunk's; or -1.
std::int64_t Call::take_ahead(std::int64_t in_file, Chunk* chunk) {
  const std::int32_t spare = ahead_.find(layer_, in_file);
  if (spare < 0) return -1;
  chunk->spares.push_back(spare);
  if (keeps(in_file)) chunk->to_keep.push_back({in_file, spare});
  ahead_.taken(in_file);
  common_.places.wanted(spare);
  ++common_.sums.used;
  return spare;
}

// Whether a slot that is read gets a place in the cache. What is streamed takes free ones only.
bool Call::keeps(std::int64_t in_file) const {
  const NeuronCache& cache = common_.places.cache();
  if (!stream_ || cache.used() < cache.slots() || residents_.holds(layer_, in_file)) return true;
  return keep_anyway_ != nullptr && about().cluster == 1 && keep_anyway_[in_file] != 0;
}

void Call::ask() {
  while (!chunks_.waiting.empty() && !broken_) {
    std::unique_ptr<ReadBatch> batch = take(chunks_.waiting.front());
    if (batch != nullptr) {
      reads_.submit(std::move(batch), &stats_);  // if there is no memory, that has failed this call
      continue;
    }
    if (ahead_.drop()) continue;  // something has to be read again, which is more urgent
    // Others may hold every spare when a guess for the one that is to be next has failed.
    const bool stuck = !chunks_.next_is_there(stream_);
    if (reads_.under_way() == 0 && chunks_.given == chunks_.finished && stuck)
      fail({"no room for what has to be read again"});
    return;
  }
}

void Call::ask_again() noexcept {
  if (chunks_.waiting.empty() || !begun_) return;  // begin() asks
  try {
    ask();
  } catch (...) {
    fail(kNoMemory);
  }
}

// Reads of what the first waiting chunk misses, as far as there are places; null if there are none.
std::unique_ptr<ReadBatch> Call::take(std::int64_t c) {
  Places& places = common_.places;
  Chunk& chunk = chunks_[c];
  auto batch = std::make_unique<ReadBatch>();
  batch->layer = layer_;
  batch->chunk = c;
  const std::size_t left = chunk.missing.size() - chunk.asked;
  batch->wanted.reserve(left);
  chunk.spares.reserve(chunk.spares.size() + left);
  for (; chunk.asked < chunk.missing.size(); ++chunk.asked) {
    const std::int64_t in_file = chunk.missing[chunk.asked];
    const std::int32_t place = place_for(in_file, &chunk);
    if (place < 0) break;
    places.begin(place, false, c);
    ++chunk.on_the_way;
    batch->wanted.push_back({in_file, place});
  }
  if (chunk.asked == chunk.missing.size()) chunks_.waiting.pop_front();
  if (batch->wanted.empty()) return nullptr;
  point_to(chunk, batch->wanted);
  try {
    reads_.plan(batch.get());
  } catch (...) {
    for (const Wanted& w : batch->wanted) places.empty(key() + w.in_file, w.place);
    throw;
  }
  trace_counter(TraceCounter::kReading, reads_.asked_for());
  return batch;
}

// In the cache, or a spare of the chunk (of which it has reserved one); -1 if there is none.
std::int32_t Call::place_for(std::int64_t in_file, Chunk* chunk) {
  Places& places = common_.places;
  NeuronCache& cache = places.cache();
  // What was to stay may have been read for that meanwhile.
  if (keeps(in_file) && !cache.contains(key() + in_file)) {
    const std::int64_t place = cache.insert(key() + in_file, residents_.holds(layer_, in_file));
    if (place >= 0) return static_cast<std::int32_t>(place);
  }
  if (places.free_spares() == 0) return -1;
  chunk->spares.push_back(places.take_spare());
  ++common_.sums.uncached;
  return chunk->spares.back();
}

// Neurons of the chunk are where their slots are going to be.
void Call::point_to(const Chunk& chunk, const std::vector<Wanted>& wanted) {
  const StoreLayer& l = about();
  const char** at = where_[static_cast<std::size_t>(layer_)].data();
  auto next = wanted.begin();
  for (std::int64_t k = 0; k < chunk.count; ++k) {
    const std::int64_t id = chunk.ids[k], in_file = id / l.cluster;
    while (next != wanted.end() && next->in_file < in_file) ++next;
    if (next == wanted.end()) break;
    if (next->in_file == in_file) at[id] = common_.places.at(next->place) + id % l.cluster * l.neuron_bytes();
  }
}

// While a prompt is processed, the layer after this one is read into spares that this one has no use for any more.
void Call::read_ahead() {
  while (stream_ && ahead_.whole() && last_piece_ && common_.options.pipeline && !broken_ && chunks_.waiting.empty()) {
    std::unique_ptr<ReadBatch> batch;
    try {
      batch = ahead_.take(layer_);
    } catch (const std::bad_alloc&) {  // a guess less
    }
    if (batch == nullptr || !reads_.submit(std::move(batch), &stats_)) return;
  }
}

bool Call::arrived(std::int64_t c, const Wanted& slot, bool asked_for, const Wrong& wrong) noexcept {
  Chunk& chunk = chunks_[c];
  --chunk.on_the_way;
  if (wrong && !asked_for && common_.places.is_spare(slot.place)) {  // it is read again elsewhere
    chunk.spares.erase(std::find(chunk.spares.begin(), chunk.spares.end(), slot.place));
    common_.places.give_back(slot.place);
    const auto kept = std::find_if(chunk.to_keep.begin(), chunk.to_keep.end(),
                                   [&](const Wanted& w) { return w.place == slot.place; });
    if (kept != chunk.to_keep.end()) chunk.to_keep.erase(kept);
  }
  try {
    if (wrong && (asked_for || broken_))
      fail(wrong);
    else if (wrong)
      chunks_.missed(c, slot.in_file);
  } catch (...) {
    fail(wrong);
  }
  if (!chunk.there()) return false;
  try {
    chunks_.ready.push_back(c);
  } catch (...) {
    fail(kNoMemory);
  }
  return true;
}

// Without the pipeline, when all reads are over; chunks that wait for spares of those that are there do not count.
bool Call::may_give() const {
  if (stream_ && !begun_) return false;
  return chunks_.next_is_there(stream_) && (common_.options.pipeline || (begun_ && reads_.asked_for() == 0));
}

std::int64_t Call::next() {
  if (!over() && !may_give()) wait();
  if (over()) return -1;
  const std::int64_t c = chunks_.take(stream_);
  if (chunks_.given == chunks_.total) common_.mutex.tell();
  return c;
}

void Call::wait() {
  StoreMutex& mutex = common_.mutex;
  const TraceSpan span(Stage::kWait, layer_);
  const Clock::time_point start = Clock::now();
  const Clock::time_point give_up = start + (common_.options.spin ? kSpin : std::chrono::milliseconds(0));
  while (!over() && !may_give()) {
    const std::uint64_t seen = mutex.news().load();
    if (Clock::now() >= give_up) {
      mutex.wait_for_news();
      continue;
    }
    mutex.unlock();
    while (mutex.news().load(std::memory_order_relaxed) == seen && Clock::now() < give_up) std::this_thread::yield();
    mutex.lock();
  }
  count(&CallStats::wait_ns, since(start));
}

void Call::done(std::int64_t c) {
  Places& places = common_.places;
  NeuronCache& cache = places.cache();
  Chunk& chunk = chunks_[c];
  ++chunks_.finished;
  if (chunk.spares.empty() && !stream_) return;
  for (const Wanted& w : chunk.to_keep) {
    if (cache.contains(key() + w.in_file)) continue;  // it was to stay, and was read for that meanwhile
    const std::int64_t place = cache.insert(key() + w.in_file, residents_.holds(layer_, w.in_file));
    if (place < 0) break;
    places.wanted(place);
    std::memcpy(places.at(place), places.at(w.place), static_cast<std::size_t>(places.bytes()));
    common_.recording.lose();  // a replay would have it in the cache before
  }
  chunk.to_keep.clear();
  places.give_back(chunk.spares);
  chunk.spares.clear();
  ask();
  read_ahead();
}

}  // namespace pi2
