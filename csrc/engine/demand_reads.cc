#include "engine/demand_reads.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/trace.h"
#include "cache/cache_use.h"

namespace pi2 {
namespace {

constexpr std::int64_t kAhead = 16;  // distance in neurons between a look-up and its processor prefetch

}  // namespace

void DemandReads::set_up() {
  const Layout& layout = common_.layout;
  last_calls_.resize(static_cast<std::size_t>(layout.count()));
  residency_.resize(static_cast<std::size_t>(layout.count()));
  for (const StoreLayer& l : layout.layers()) {
    where_.emplace_back(static_cast<std::size_t>(l.neurons), nullptr);
    for (std::int64_t i = 0; layout.mapped() != nullptr && i < l.neurons; ++i)
      where_.back()[static_cast<std::size_t>(i)] =
          layout.mapped() + l.slots + i / l.cluster * l.slot_bytes + i % l.cluster * l.neuron_bytes();
  }
}

void DemandReads::start(std::int64_t layer) {
  calling_ = true;
  layer_ = layer;
  broken_ = false;
  problem_ = {};
  stats_ = {};
  chunks_.forget();
}

void DemandReads::count(std::int64_t CallStats::* what, std::int64_t n) {
  stats_.*what += n;
  common_.sums.*what += n;
}

void DemandReads::add_to(CallStats* stats) const {
  for (std::int64_t CallStats::* const what :
       {&CallStats::wanted, &CallStats::hits, &CallStats::reads, &CallStats::bytes_read, &CallStats::wait_ns})
    stats->*what += stats_.*what;
}

void DemandReads::end() {
  while (reads_.asked_for() > 0) common_.mutex.wait_for_news();
  calling_ = false;
  if (!broken_) return;
  chunks_.waiting.clear();
  common_.places.nobody_waits();  // for prefetched slots, which may still be in flight
  for (Chunk& chunk : chunks_.all) {
    for (const std::int32_t spare : chunk.spares) common_.places.drop(spare);
    chunk.spares.clear();
  }
}

void DemandReads::abandon() {
  broken_ = true;
  end();
}

void DemandReads::fail(const ReadError& why) noexcept {
  if (!broken_) problem_ = why;
  common_.recording.lose();
  broken_.store(true, std::memory_order_release);
  common_.mutex.tell();
}

void DemandReads::leave_out_missing(std::uint8_t* active, std::int64_t tokens, std::int64_t n_hot) {
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
    // Slots before the first wanted one are computed elsewhere and do not count as left out.
    if (!there && (n_hot + i) / l.cluster >= hot_set_.first_wanted(layer_)) ++common_.sums.left_out;
  }
}

void DemandReads::expect(std::int64_t n_chunks, bool stream, bool last) {
  while (reads_.asked_for() > 0) common_.mutex.wait_for_news();  // reads of earlier tokens, if one failed
  if (broken_) return;
  chunks_.expect(n_chunks);
  begun_ = false;
  stream_ = stream;
  last_piece_ = last;
}

void DemandReads::begin(const std::int64_t* ids, const std::int64_t* counts, std::int64_t chunk_size,
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
  const bool known = common_.layout.mapped() != nullptr, resident = !known && is_resident();
  // Look up all chunks first: this pins what is in the cache before missing slots evict anything.
  for (std::int64_t c = 0; c < n_chunks; ++c) {
    if (resident)
      count(&CallStats::hits, chunks_[c].count);
    else if (!known)
      look_up(c);
    if (!chunks_[c].missing.empty())
      chunks_.waiting.push_back(c);
    else if (chunks_[c].there())
      chunks_.ready.push_back(c);
  }
  ahead_.drop();  // slots that were read ahead and are not needed
  note_uses(common_.sums.hits - hits_before);
  if (common_.options.window > 0)  // counted in calls of this layer: not every token calls an expert
    leave_window(&cache, &last_calls_[static_cast<std::size_t>(layer_)], common_.options.window, key(),
                 common_.layout.key_of(layer_ + 1));
  common_.mutex.tell();
  submit_reads();
  trace_counter(TraceCounter::kHotNeurons, cache.fixed());
  trace_counter(TraceCounter::kColdNeurons, cache.used() - cache.fixed());
  begun_ = true;
  common_.mutex.tell();
  read_ahead();
}

void DemandReads::note_uses(std::int64_t hits) {
  if (!common_.recording.on()) return common_.recording.lose();
  const std::uint8_t* kept = about().cluster == 1 ? keep_anyway_ : nullptr;
  const std::vector<Chunk>& chunks = chunks_.all;
  common_.recording.log().add(layer_, about().neurons, stream_, kept, hits, [&](const auto& use) {
    for (const Chunk& chunk : chunks)
      for (std::int64_t k = 0; k < chunk.count; ++k) use(chunk.ids[k]);
  });
}

// Whether the whole layer is in memory and stays where it is. A cache that holds every key evicts nothing, and looking
// up each neuron costs up to a tenth of the computation. where_ stays valid until a neuron moves.
bool DemandReads::is_resident() {
  Places& places = common_.places;
  const NeuronCache& cache = places.cache();
  if (cache.used() < cache.keys() || common_.options.window > 0 || common_.recording.on()) return false;
  Residency& rest = residency_[static_cast<std::size_t>(layer_)];
  if (rest.changes == cache.changes()) return rest.whole;
  if (reads_.under_way() > 0) return false;
  rest = {cache.changes(), true};
  const StoreLayer& l = about();
  const char** at = where_[static_cast<std::size_t>(layer_)].data();
  for (std::int64_t id = 0; id < l.neurons; ++id) {
    const std::int64_t place = cache.slot_of(key() + id / l.cluster);
    rest.whole = rest.whole && !places.guessed(place);  // their first use is still to be counted
    at[id] = places.at(place) + id % l.cluster * l.neuron_bytes();
  }
  return rest.whole;
}

void DemandReads::look_up(std::int64_t c) {
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

// The spare that this slot was read ahead into, now owned by the chunk; -1: none.
std::int64_t DemandReads::take_ahead(std::int64_t in_file, Chunk* chunk) {
  const std::int32_t spare = ahead_.find(layer_, in_file);
  if (spare < 0) return -1;
  chunk->spares.push_back(spare);
  if (keeps(in_file)) chunk->to_keep.push_back({in_file, spare});
  ahead_.taken(in_file);
  common_.places.wanted(spare);
  ++common_.sums.used;
  return spare;
}

// Whether a slot that is read stays in the cache. Streamed slots only take free places, unless marked.
bool DemandReads::keeps(std::int64_t in_file) const {
  const NeuronCache& cache = common_.places.cache();
  if (!stream_ || cache.used() < cache.slots() || hot_set_.holds(layer_, in_file)) return true;
  return keep_anyway_ != nullptr && about().cluster == 1 && keep_anyway_[in_file] != 0;
}

void DemandReads::submit_reads() {
  while (!chunks_.waiting.empty() && !broken_) {
    std::unique_ptr<ReadBatch> batch = take(chunks_.waiting.front());
    if (batch != nullptr) {
      reads_.submit(std::move(batch), &stats_);  // without memory this fails the call
      continue;
    }
    if (ahead_.drop()) continue;  // demand reads need the spares more than read-ahead does
    // Other chunks may hold every spare when a prefetched slot of the next chunk failed.
    const bool stuck = !chunks_.next_is_there(stream_);
    if (reads_.under_way() == 0 && chunks_.given == chunks_.finished && stuck)
      fail({"no room for what has to be read again"});
    return;
  }
}

void DemandReads::retry_reads() noexcept {
  if (chunks_.waiting.empty() || !begun_) return;  // begin() submits them
  try {
    submit_reads();
  } catch (...) {
    fail(kNoMemory);
  }
}

// Reads of what chunk c misses, as far as there are places; null if there is none.
std::unique_ptr<ReadBatch> DemandReads::take(std::int64_t c) {
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

// A cache place, or one of the chunk's spares (it has reserved one); -1: none is free.
std::int32_t DemandReads::place_for(std::int64_t in_file, Chunk* chunk) {
  Places& places = common_.places;
  NeuronCache& cache = places.cache();
  // The rebalancer may have read it meanwhile.
  if (keeps(in_file) && !cache.contains(key() + in_file)) {
    const std::int64_t place = cache.insert(key() + in_file, hot_set_.holds(layer_, in_file));
    if (place >= 0) return static_cast<std::int32_t>(place);
  }
  if (places.free_spares() == 0) return -1;
  chunk->spares.push_back(places.take_spare());
  ++common_.sums.uncached;
  return chunk->spares.back();
}

// Points the chunk's neurons to the places that their slots are read into.
void DemandReads::point_to(const Chunk& chunk, const std::vector<Wanted>& wanted) {
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

// Prompts: reads the next layer into spares that this layer no longer needs.
void DemandReads::read_ahead() {
  while (stream_ && ahead_.whole() && last_piece_ && common_.options.pipeline && !broken_ && chunks_.waiting.empty()) {
    std::unique_ptr<ReadBatch> batch;
    try {
      batch = ahead_.take(layer_);
    } catch (const std::bad_alloc&) {  // read-ahead is optional
    }
    if (batch == nullptr || !reads_.submit(std::move(batch), &stats_)) return;
  }
}

bool DemandReads::arrived(std::int64_t c, const Wanted& slot, bool asked_for, const ReadError& wrong) noexcept {
  Chunk& chunk = chunks_[c];
  --chunk.on_the_way;
  if (wrong && !asked_for && common_.places.is_spare(slot.place)) {  // the chunk reads it again, into another place
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

// Without the pipeline a chunk is given out only when all reads have ended; chunks that wait for spares of finished
// chunks do not count.
bool DemandReads::may_give() const {
  if (stream_ && !begun_) return false;
  return chunks_.next_is_there(stream_) && (common_.options.pipeline || (begun_ && reads_.asked_for() == 0));
}

std::int64_t DemandReads::next() {
  if (!over() && !may_give()) wait();
  if (over()) return -1;
  const std::int64_t c = chunks_.take(stream_);
  if (chunks_.given == chunks_.total) common_.mutex.tell();
  return c;
}

void DemandReads::wait() {
  const TraceSpan span(Stage::kWait, layer_);
  const Clock::time_point start = Clock::now(), give_up = common_.spin_until(start);
  while (!over() && !may_give()) common_.mutex.wait_for_news(give_up);
  count(&CallStats::wait_ns, since(start));
}

void DemandReads::done(std::int64_t c) {
  Places& places = common_.places;
  NeuronCache& cache = places.cache();
  Chunk& chunk = chunks_[c];
  ++chunks_.finished;
  if (chunk.spares.empty() && !stream_) return;
  for (const Wanted& w : chunk.to_keep) {
    if (cache.contains(key() + w.in_file)) continue;  // the rebalancer has read it meanwhile
    const std::int64_t place = cache.insert(key() + w.in_file, hot_set_.holds(layer_, w.in_file));
    if (place < 0) break;
    places.wanted(place);
    std::memcpy(places.at(place), places.at(w.place), static_cast<std::size_t>(places.bytes()));
    common_.recording.lose();  // a replay would insert it earlier
  }
  chunk.to_keep.clear();
  places.give_back(chunk.spares);
  chunk.spares.clear();
  submit_reads();
  read_ahead();
}

}  // namespace pi2
