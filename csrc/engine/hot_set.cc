#include "engine/hot_set.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/arena.h"
#include "cache/cache_use.h"
#include "io/read_fully.h"

namespace pi2 {
namespace {

constexpr std::int64_t kPieceBytes = 4 << 20;  // per read of preload()
constexpr std::int64_t kFewestAtOnce = 16;

}  // namespace

void HotSet::set_up() {
  hot_share_ = common_.options.hot_share;
  if (common_.layout.mapped() != nullptr) return;
  std::vector<std::int64_t> slots;
  for (const StoreLayer& l : common_.layout.layers()) slots.push_back(l.n_slots());
  rebalance_plan_.set_up(std::move(slots), std::clamp<std::int64_t>(common_.options.run_bytes / common_.places.bytes(),
                                                                    kFewestAtOnce, kMostAtOnce));
}

// Starts a new plan towards the hot set of a cache of `slots` slots.
void HotSet::rearrange(std::int64_t slots) {
  std::vector<std::int64_t> begin, count;
  for (std::size_t l = 0; l < resident_.size(); ++l) {
    const StoreLayer& its = common_.layout.layers()[l];
    begin.push_back(first_wanted(static_cast<std::int64_t>(l)));
    count.push_back(std::min(its.n_slots() - begin.back(), (resident_[l] + its.cluster - 1) / its.cluster));
  }
  rebalance_plan_.set(std::move(begin), fitting(std::move(count), slots));
  settled_ = false;
}

void HotSet::arrange(std::vector<std::int64_t> resident, std::int64_t slots) {
  NeuronCache& cache = common_.places.cache();
  resident_.swap(resident);
  try {
    if (slots != cache.slots())
      change_size(slots);
    else
      rearrange(slots);
  } catch (...) {
    resident_.swap(resident);
    if (!resident_.empty()) rearrange(cache.slots());
    throw;
  }
}

void HotSet::leave_out(std::vector<std::int64_t> first) {
  left_out_ = std::move(first);
  if (!resident_.empty()) rearrange(common_.places.cache().slots());
}

void HotSet::release(const RebalancePlan::Piece& piece) {
  NeuronCache& cache = common_.places.cache();
  for (std::int64_t in_file = piece.last - 1; in_file >= piece.first; --in_file)
    if (!holds(piece.layer, in_file)) cache.fix(common_.layout.key_of(piece.layer) + in_file, false);
  rebalance_plan_.done(piece, piece.last);
}

void HotSet::settle() noexcept {
  settled_ = true;
  if (common_.recording.lost()) return;
  try {
    NeuronCache& cache = common_.places.cache();
    begin_with(filling(common_.layout.first_keys(), cache.slots(), rebalance_plan_.counts(), preloaded_, left_out_));
  } catch (...) {
    common_.recording.lose();
  }
}

// Brings the cache into the state of a new one that was filled with `keys`, the most frequent first; evicts others.
void HotSet::begin_with(std::vector<std::int64_t> keys) {
  NeuronCache& cache = common_.places.cache();
  std::vector<std::uint8_t> stays(static_cast<std::size_t>(common_.layout.keys()), 0);
  for (const std::int64_t key : keys) stays[static_cast<std::size_t>(key)] = cache.contains(key) ? 1 : 2;
  const auto missing = static_cast<std::int64_t>(std::count(stays.begin(), stays.end(), 2));
  // Earlier sizes may have left a few more, because shares of the cache are rounded.
  if (missing > 0 || cache.used() - static_cast<std::int64_t>(keys.size()) > common_.layout.count())
    return common_.recording.lose();
  for (std::size_t key = 0; key < stays.size(); ++key)
    if (stays[key] == 0) cache.erase(static_cast<std::int64_t>(key));
  std::reverse(keys.begin(), keys.end());
  cache.renew(keys);
}

std::int64_t HotSet::slots_for(std::int64_t cache_bytes) const {
  if (common_.options.policy == "none") return 0;
  return std::min(common_.layout.keys(), cache_bytes / common_.places.bytes());
}

std::string HotSet::refused_size(std::int64_t cache_bytes) const {
  const Places& places = common_.places;
  if (cache_bytes >= 0 && slots_for(cache_bytes) <= places.most_slots()) return "";
  return "cache_bytes: expected 0 to " + std::to_string(places.most_slots() * places.bytes()) +
         ", with which it was opened, found " + std::to_string(cache_bytes);
}

void HotSet::resize(std::int64_t slots, double hot_share) {
  hot_share_ = hot_share;
  common_.recording.lose();
  change_size(slots);
}

void HotSet::change_size(std::int64_t slots) {
  NeuronCache& cache = common_.places.cache();
  try {
    if (resident_.empty()) {
      release_hot(&cache, common_.layout.first_keys(), slots, hot_share_, left_out_);
    } else {
      rearrange(slots);
      RebalancePlan::Piece piece;
      while (rebalance_plan_.next(&piece) && piece.release) release(piece);
    }
    common_.places.resize(slots);
  } catch (...) {
    if (!resident_.empty()) rearrange(cache.slots());
    throw;
  }
}

std::string HotSet::preload() {
  NeuronCache& cache = common_.places.cache();
  const std::vector<std::int64_t>& first_keys = common_.layout.first_keys();
  if (common_.recording.on() || !left_out_.empty()) common_.recording.lose();
  // If this ends early, none of the new keys may count as loaded.
  const std::vector<std::int64_t> hot =
      resident_.empty() ? hot_counts(first_keys, cache.slots(), hot_share_, left_out_) : rebalance_plan_.counts();
  const std::vector<std::int64_t> made = insert_first(&cache, first_keys, hot, true, left_out_);
  for (std::int64_t l = 0; l < static_cast<std::int64_t>(hot.size()); ++l)
    rebalance_plan_.may_be_fixed(static_cast<std::size_t>(l), first_wanted(l) + hot[static_cast<std::size_t>(l)]);
  const auto forget = [&]() PI2_REQUIRES(kLock) {
    for (const std::int64_t key : made) cache.erase(key);
    common_.recording.lose();
  };
  try {
    const ReadError wrong = load(made);
    if (wrong) forget();
    preloaded_ = preloaded_ || !wrong;
    if (!resident_.empty()) settled_ = false;
    return wrong.message();
  } catch (...) {
    forget();
    throw;
  }
}

// Reads the neurons of keys that were just inserted, in large pieces.
ReadError HotSet::load(std::vector<std::int64_t> keys) {
  const Layout& layout = common_.layout;
  Places& places = common_.places;
  NeuronCache& cache = places.cache();
  std::sort(keys.begin(), keys.end());
  for (const std::int64_t key : keys) places.wanted(cache.slot_of(key));
  std::int64_t largest = 0;
  for (const StoreLayer& l : layout.layers()) largest = std::max(largest, l.slot_bytes);
  Arena piece;
  if (!piece.allocate(std::max(kPieceBytes, largest), false)) return kNoMemory;
  auto next = keys.begin();
  for (std::int64_t k = 0; k < layout.count(); ++k) {
    const StoreLayer& l = layout.about(k);
    const std::int64_t step = std::max<std::int64_t>(1, kPieceBytes / l.slot_bytes);
    while (next != keys.end() && *next < layout.key_of(k + 1)) {
      const std::int64_t first = *next - layout.key_of(k);
      const auto end = std::lower_bound(next, keys.end(), std::min(*next + step, layout.key_of(k + 1)));
      const std::int64_t bytes = (*(end - 1) - *next + 1) * l.slot_bytes, offset = l.slots + first * l.slot_bytes;
      const int error = read_fully(layout.file().descriptor(), piece.data(), bytes, offset);
      if (error != 0) return {nullptr, error, k, first * l.cluster, bytes, offset};
      for (; next != end; ++next) {
        const std::int64_t in_file = *next - layout.key_of(k);
        const char* slot = piece.data() + (in_file - first) * l.slot_bytes;
        const ReadError wrong = common_.options.verify ? layout.check_neurons(k, in_file, slot) : ReadError();
        if (wrong) return wrong;
        // Does not count as a use: the cache keeps the order of insertion.
        std::memcpy(places.at(cache.slot_of(*next)), slot, static_cast<std::size_t>(l.cluster * l.neuron_bytes()));
      }
    }
  }
  return {};
}

}  // namespace pi2
