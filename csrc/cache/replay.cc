#include "pi2/replay.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <queue>
#include <stdexcept>

#include "cache/cache_use.h"
#include "cache/neuron_cache.h"

namespace pi2 {
namespace {

std::vector<std::int64_t> first_keys(const std::vector<ReplayLayer>& layers) {
  std::vector<std::int64_t> first = {0};
  for (const ReplayLayer& l : layers) first.push_back(first.back() + (l.neurons + l.cluster - 1) / l.cluster);
  return first;
}

// One recorded call. wanted and kept are rows of bits, or null.
struct Call {
  std::size_t layer = 0;
  const std::uint8_t *wanted = nullptr, *kept = nullptr;
};

bool bit(const std::uint8_t* bits, std::int64_t i) { return (bits[i / 8] >> (i % 8) & 1) != 0; }

std::int64_t row_bytes(const ReplayLayer& l) { return (l.neurons + 7) / 8; }

template <class Use>  // (const Call&)
void for_each_call(const AccessView& accesses, const std::vector<ReplayLayer>& layers, const Use& use) {
  const std::uint8_t* at = accesses.bits;
  for (std::int64_t c = 0; c < accesses.calls; ++c) {
    Call call;
    call.layer = static_cast<std::size_t>(accesses.layers[c]);
    call.wanted = at;
    at += row_bytes(layers[call.layer]);
    if (accesses.streamed[c] != 0) {
      call.kept = at;
      at += row_bytes(layers[call.layer]);
    }
    use(call);
  }
}

template <class Use>  // (slot of the file, number of its neurons that are wanted)
void for_each_slot(const Call& call, const ReplayLayer& l, const Use& use) {
  std::int64_t slot = -1, neurons = 0;
  for (std::int64_t byte = 0; byte < row_bytes(l); ++byte) {
    for (unsigned bits = call.wanted[byte]; bits != 0; bits &= bits - 1) {
      const std::int64_t in_file = (byte * 8 + __builtin_ctz(bits)) / l.cluster;
      if (in_file != slot && neurons > 0) use(slot, neurons);
      if (in_file != slot) neurons = 0;
      slot = in_file;
      ++neurons;
    }
  }
  if (neurons > 0) use(slot, neurons);
}

// How many slots of each layer are fixed in a cache of `slots` slots.
std::vector<std::int64_t> fixed_counts(const std::vector<ReplayLayer>& layers, const std::vector<std::int64_t>& first,
                                       const ReplayOptions& options, std::int64_t slots) {
  if (options.fixed.empty()) return hot_counts(first, slots, options.preload ? options.hot_share : 0);
  if (options.fixed.size() != layers.size())
    throw std::invalid_argument("fixed: expected " + std::to_string(layers.size()) +
                                " numbers, one of each layer, found " + std::to_string(options.fixed.size()));
  std::vector<std::int64_t> wanted;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const std::int64_t n = options.fixed[l];
    if (n < 0 || n > layers[l].neurons)
      throw std::invalid_argument("fixed: expected 0 to " + std::to_string(layers[l].neurons) + " neurons of layer " +
                                  std::to_string(l) + ", found " + std::to_string(n));
    wanted.push_back((n + layers[l].cluster - 1) / layers[l].cluster);
  }
  return fitting(wanted, slots);
}

// Whether a call keeps a slot of the file that it has to read where no slot of the cache is free.
bool keeps(const Call& call, const ReplayLayer& l, std::int64_t slot) {
  return call.kept == nullptr || (l.cluster == 1 && bit(call.kept, slot));
}

}  // namespace

void check_accesses(const AccessView& accesses, const std::vector<ReplayLayer>& layers) {
  std::int64_t bytes = 0;
  for (const ReplayLayer& l : layers)
    if (l.neurons < 1 || l.cluster < 1)
      throw std::invalid_argument("layers: expected neurons and clusters of 1 or more");
  if (first_keys(layers).back() >= std::int64_t{1} << 31) throw std::invalid_argument("layers: too many slots");
  for (std::int64_t c = 0; c < accesses.calls; ++c) {
    const std::int64_t layer = accesses.layers[c];
    if (layer < 0 || layer >= static_cast<std::int64_t>(layers.size()))
      throw std::invalid_argument("call " + std::to_string(c) + ": expected layer 0 to " +
                                  std::to_string(static_cast<std::int64_t>(layers.size()) - 1) + ", found " +
                                  std::to_string(layer));
    if (accesses.streamed[c] > 1)
      throw std::invalid_argument("call " + std::to_string(c) + ": expected streamed 0 or 1, found " +
                                  std::to_string(accesses.streamed[c]));
    const ReplayLayer& l = layers[static_cast<std::size_t>(layer)];
    for (int row = 0; row <= accesses.streamed[c]; ++row) {
      bytes += row_bytes(l);
      if (bytes > accesses.n_bits) break;
      if (l.neurons % 8 != 0 && accesses.bits[bytes - 1] >> (l.neurons % 8) != 0)
        throw std::invalid_argument("call " + std::to_string(c) + ": a neuron past the last of its layer");
    }
  }
  if (bytes != accesses.n_bits)
    throw std::invalid_argument("expected " + std::to_string(bytes) + " bytes of bits, found " +
                                std::to_string(accesses.n_bits));
}

std::vector<ReplayCounts> replay(const AccessView& accesses, const std::vector<ReplayLayer>& layers,
                                 const ReplayOptions& options) {
  check_accesses(accesses, layers);
  CachePolicy policy;
  const std::string wrong = policy_of(options.policy, &policy);
  if (!wrong.empty()) throw std::invalid_argument("policy: " + wrong);
  const std::vector<std::int64_t> first = first_keys(layers);
  NeuronCache cache(first.back(), std::min(options.slots, first.back()), policy);
  insert_first(&cache, first, fixed_counts(layers, first, options, cache.slots()), options.preload);
  std::vector<ReplayCounts> counts(layers.size());
  std::vector<std::deque<std::int64_t>> last_calls(layers.size());
  std::vector<std::int64_t> missing;
  for_each_call(accesses, layers, [&](const Call& call) {
    ReplayCounts& n = counts[call.layer];
    missing.clear();
    cache.begin();
    for_each_slot(call, layers[call.layer], [&](std::int64_t slot, std::int64_t neurons) {
      n.wanted += neurons;
      if (cache.look_up(first[call.layer] + slot) >= 0)
        n.hits += neurons;
      else
        missing.push_back(slot);
    });
    if (options.window > 0)
      leave_window(&cache, &last_calls[call.layer], options.window, first[call.layer], first[call.layer + 1]);
    n.missed += static_cast<std::int64_t>(missing.size());
    for (const std::int64_t slot : missing)
      if (cache.used() < cache.slots() || keeps(call, layers[call.layer], slot)) cache.insert(first[call.layer] + slot);
  });
  return counts;
}

ReplayWork replay_work(const AccessView& accesses, const std::vector<ReplayLayer>& layers,
                       const ReplayOptions& options) {
  check_accesses(accesses, layers);
  const std::vector<std::int64_t> first = first_keys(layers);
  NeuronCache cache(first.back(), std::min(options.slots, first.back()), CachePolicy::kStatic);
  ReplayWork work;
  for (const std::int64_t key :
       insert_first(&cache, first, fixed_counts(layers, first, options, cache.slots()), options.preload))
    work.filled.insert(work.filled.end(), {key, cache.is_fixed(key) ? 1 : 0});
  for_each_call(accesses, layers, [&](const Call& call) {
    const ReplayLayer& l = layers[call.layer];
    for_each_slot(call, l, [&](std::int64_t slot, std::int64_t neurons) {
      work.wanted.insert(work.wanted.end(), {first[call.layer] + slot, neurons, keeps(call, l, slot) ? 1 : 0});
    });
    work.ends.push_back(static_cast<std::int64_t>(work.wanted.size()) / 3);
  });
  return work;
}

std::vector<ReplayCounts> replay_optimal(const AccessView& accesses, const std::vector<ReplayLayer>& layers,
                                         const ReplayOptions& options) {
  check_accesses(accesses, layers);
  constexpr std::int32_t kNever = std::numeric_limits<std::int32_t>::max();
  if (accesses.calls >= kNever) throw std::invalid_argument("expected fewer than 2^31 calls");
  const std::vector<std::int64_t> first = first_keys(layers);
  const std::int64_t keys = first.back(), slots = std::min(options.slots, keys);
  // For each access, the next call that wants the key: found by going backwards.
  std::vector<std::int32_t> wanted;  // keys, of all calls
  std::vector<std::int64_t> ends;    // where each call ends in `wanted`
  for_each_call(accesses, layers, [&](const Call& call) {
    for_each_slot(call, layers[call.layer], [&](std::int64_t slot, std::int64_t) {
      wanted.push_back(static_cast<std::int32_t>(first[call.layer] + slot));
    });
    ends.push_back(static_cast<std::int64_t>(wanted.size()));
  });
  std::vector<std::int32_t> next(wanted.size()), upcoming(static_cast<std::size_t>(keys), kNever);
  for (std::int64_t c = accesses.calls - 1; c >= 0; --c) {
    for (std::int64_t i = c == 0 ? 0 : ends[static_cast<std::size_t>(c - 1)]; i < ends[static_cast<std::size_t>(c)];
         ++i) {
      std::int32_t& its = upcoming[static_cast<std::size_t>(wanted[static_cast<std::size_t>(i)])];
      next[static_cast<std::size_t>(i)] = its;
      its = static_cast<std::int32_t>(c);
    }
  }
  std::vector<std::uint8_t> there(static_cast<std::size_t>(keys), 0);
  std::int64_t used = 0;
  std::priority_queue<std::pair<std::int32_t, std::int32_t>> last;  // next use and key; outdated entries are skipped
  for (const std::int64_t key : filling(first, slots, fixed_counts(layers, first, options, slots), options.preload)) {
    there[static_cast<std::size_t>(key)] = 1;
    last.emplace(upcoming[static_cast<std::size_t>(key)], static_cast<std::int32_t>(key));
    ++used;
  }
  std::vector<ReplayCounts> counts(layers.size());
  std::size_t i = 0;
  for_each_call(accesses, layers, [&](const Call& call) {
    ReplayCounts& n = counts[call.layer];
    for_each_slot(call, layers[call.layer], [&](std::int64_t, std::int64_t neurons) {
      const auto key = static_cast<std::size_t>(wanted[i]);
      n.wanted += neurons;
      n.hits += there[key] != 0 ? neurons : 0;
      n.missed += there[key] == 0;
      used += there[key] == 0;
      there[key] = 1;
      upcoming[key] = next[i];
      last.emplace(next[i], wanted[i]);
      ++i;
    });
    // During a call everything that it wants is in memory; afterwards the best keys stay.
    while (used > slots) {
      const auto [use, key] = last.top();
      last.pop();
      if (there[static_cast<std::size_t>(key)] == 0 || upcoming[static_cast<std::size_t>(key)] != use) continue;
      there[static_cast<std::size_t>(key)] = 0;
      --used;
    }
  });
  return counts;
}

}  // namespace pi2
