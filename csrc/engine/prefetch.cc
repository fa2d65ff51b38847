#include "engine/prefetch.h"

#include <algorithm>
#include <new>
#include <utility>

namespace pi2 {
namespace {

// Slots of the file with at least one neuron that is likely to be needed.
std::vector<std::int64_t> likely(const StoreLayer& l, std::int64_t n_hot, const std::uint8_t* active,
                                 std::int64_t tokens) {
  const std::int64_t cold = l.neurons - n_hot;
  const auto wanted = [&](std::int64_t id) {
    if (id < n_hot || active == nullptr) return true;
    for (std::int64_t t = 0; t < tokens; ++t)
      if (active[t * cold + id - n_hot]) return true;
    return false;
  };
  std::vector<std::int64_t> slots;
  for (std::int64_t id = 0; id < l.neurons; ++id) {
    if (!wanted(id)) continue;
    slots.push_back(id / l.cluster);
    id = (slots.back() + 1) * l.cluster - 1;  // the slot's other neurons come with it
  }
  return slots;
}

}  // namespace

void Prefetch::operator()(std::int64_t layer, std::int64_t n_hot, const std::uint8_t* active, std::int64_t tokens,
                          CallStats* stats) {
  if (common_.layout.mapped() != nullptr || common_.forked()) return;
  try {
    std::vector<std::int64_t> slots = likely(common_.layout.about(layer), n_hot, active, tokens);
    auto batch = std::make_unique<ReadBatch>();
    batch->wanted.reserve(slots.size());
    batch->layer = layer;
    batch->asked_for = false;
    const Locked lock(common_.mutex);
    // A call of this layer has already looked up its neurons and is about to read what is missing.
    if (demand_.wants_places_of(layer)) return;
    common_.recording.lose();
    take(std::move(slots), batch.get());
    // If this fails, the call that needs them reads them.
    if (!batch->wanted.empty()) reads_.submit(std::move(batch), stats);
  } catch (const std::bad_alloc&) {
  }
}

bool Prefetch::mostly_missing(std::int64_t layer, std::int64_t n_hot, const std::uint8_t* active,
                              std::int64_t tokens) const {
  if (common_.layout.mapped() != nullptr || common_.forked()) return false;
  std::vector<std::int64_t> slots = likely(common_.layout.about(layer), n_hot, active, tokens);
  const Locked lock(common_.mutex);
  leave_to_others(layer, &slots);
  const NeuronCache& cache = common_.places.cache();
  const std::int64_t key = common_.layout.key_of(layer);
  const auto there =
      std::count_if(slots.begin(), slots.end(), [&](std::int64_t in_file) { return cache.contains(key + in_file); });
  return 2 * there < static_cast<std::int64_t>(slots.size());
}

void Prefetch::leave_to_others(std::int64_t layer, std::vector<std::int64_t>* slots) const {
  slots->erase(slots->begin(), std::lower_bound(slots->begin(), slots->end(), hot_set_.first_wanted(layer)));
}

// Inserts slots that are not in the cache, as far as it has room, and plans their reads.
void Prefetch::take(std::vector<std::int64_t> slots, ReadBatch* batch) {
  Places& places = common_.places;
  NeuronCache& cache = places.cache();
  const std::int64_t key = common_.layout.key_of(batch->layer);
  leave_to_others(batch->layer, &slots);
  // look_up() pins what is in the cache, so that the insertions below do not evict it.
  slots.erase(std::remove_if(slots.begin(), slots.end(),
                             [&](std::int64_t in_file) { return cache.look_up(key + in_file) >= 0; }),
              slots.end());
  for (const std::int64_t in_file : slots) {
    const std::int64_t place = cache.insert(key + in_file, hot_set_.holds(batch->layer, in_file));
    if (place < 0) break;  // everything in the cache is pinned
    batch->wanted.push_back({in_file, static_cast<std::int32_t>(place)});
    places.begin(place, true);
  }
  try {
    reads_.plan(batch);
  } catch (...) {
    for (const Wanted& w : batch->wanted) places.empty(key + w.in_file, w.place);
    throw;
  }
  common_.sums.guessed += static_cast<std::int64_t>(batch->wanted.size());
}

}  // namespace pi2
