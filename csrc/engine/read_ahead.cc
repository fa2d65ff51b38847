#include "engine/read_ahead.h"

namespace pi2 {

void ReadAhead::set_up() {
  for (std::int64_t l = 0; l < common_.layout.count(); ++l) follower_.push_back(l + 1);
  follower_.back() = -1;
}

void ReadAhead::follow(std::int64_t layer, bool stream, const Chunks& chunks) {
  if (!stream || layer != layer_) drop();
  if (!stream) return;
  if (last_ >= 0 && last_ < layer) follower_[static_cast<std::size_t>(last_)] = layer;
  last_ = layer;
  const StoreLayer& l = common_.layout.about(layer);
  whole_ = 5 * chunks.neurons() > 4 * (l.neurons - hot_set_.first_wanted(layer) * l.cluster);
  if (layer_ != layer) return;
  // A slot that was skipped because the cache had it may have been evicted since. It would then wait for spares that
  // later chunks hold: start again.
  const NeuronCache& cache = common_.places.cache();
  const std::int64_t key = common_.layout.key_of(layer);
  for (const Chunk& chunk : chunks.all) {
    for (std::int64_t k = 0; k < chunk.count; ++k) {
      const std::int64_t in_file = chunk.ids[k] / l.cluster;
      if (in_file < next_ && by_slot_[static_cast<std::size_t>(in_file)] < 0 && !cache.contains(key + in_file)) {
        drop();
        return;
      }
    }
  }
}

void ReadAhead::lose(std::int64_t layer, const Wanted& wanted) {
  if (find(layer, wanted.in_file) != wanted.place) return;
  taken(wanted.in_file);
  common_.places.give_back(wanted.place);
}

bool ReadAhead::drop() {
  if (layer_ < 0) return false;
  for (const std::int32_t spare : by_slot_)
    if (spare >= 0) common_.places.drop(spare);
  layer_ = -1;
  return true;
}

std::unique_ptr<ReadBatch> ReadAhead::take(std::int64_t layer) {
  constexpr std::size_t kFewest = 64, kMost = 512;  // slots
  Places& places = common_.places;
  const std::int64_t after = follower_[static_cast<std::size_t>(layer)];
  if (after < 0 || places.free_spares() < kFewest) return nullptr;
  const StoreLayer& l = common_.layout.about(after);
  if (layer_ != after) {
    drop();
    by_slot_.assign(static_cast<std::size_t>(l.n_slots()), -1);
    layer_ = after;
    next_ = hot_set_.first_wanted(after);
  }
  auto batch = std::make_unique<ReadBatch>();
  batch->layer = after;
  batch->asked_for = false;
  batch->wanted.reserve(kMost);
  for (; next_ < l.n_slots() && batch->wanted.size() < kMost && places.free_spares() > 0; ++next_)
    if (!places.cache().contains(common_.layout.key_of(after) + next_))
      batch->wanted.push_back({next_, places.take_spare()});
  if (batch->wanted.empty()) return nullptr;
  try {
    reads_.plan(batch.get());
  } catch (...) {
    for (const Wanted& w : batch->wanted) places.give_back(w.place);
    throw;
  }
  for (const Wanted& w : batch->wanted) {
    by_slot_[static_cast<std::size_t>(w.in_file)] = w.place;
    places.begin(w.place, true);
  }
  common_.sums.guessed += static_cast<std::int64_t>(batch->wanted.size());
  return batch;
}

}  // namespace pi2
