// What a store does with its cache beside looking up: shared with replays, whose hits are then those of a run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "core/neuron_cache.h"

namespace pi2 {

// Keys of a layer are first[layer]..first[layer + 1] - 1, the most frequent first; of them the first left_out[layer]
// are wanted by nobody (none where it is empty). Of as many slots, each layer's share.
inline std::vector<std::int64_t> shares(const std::vector<std::int64_t>& first, std::int64_t slots,
                                        const std::vector<std::int64_t>& left_out = {}) {
  std::vector<std::int64_t> keys, count;
  std::int64_t all = 0;
  for (std::size_t l = 0; l + 1 < first.size(); ++l) {
    keys.push_back(first[l + 1] - first[l] - (left_out.empty() ? 0 : left_out[l]));
    all += keys.back();
  }
  for (const std::int64_t n : keys) {
    const double share =
        static_cast<double>(slots) * static_cast<double>(n) / static_cast<double>(std::max<std::int64_t>(1, all));
    count.push_back(std::min(n, static_cast<std::int64_t>(share)));
  }
  return count;
}

// Of a layer's share of the cache, how many of the most frequent are fixed.
inline std::int64_t hot_of(std::int64_t share, double hot_share) {
  std::int64_t hot = 0;
  while (hot < share && static_cast<double>(hot) < hot_share * static_cast<double>(share)) ++hot;
  return hot;
}

// Gives what is free of the cache to the most frequent keys of every layer that are not there, and says which; those of
// the hot share are fixed, there before or not. The most frequent come last: they are the last to leave.
inline std::vector<std::int64_t> insert_first(NeuronCache* cache, const std::vector<std::int64_t>& first,
                                              double hot_share, const std::vector<std::int64_t>& left_out = {}) {
  const std::vector<std::int64_t> count = shares(first, cache->slots(), left_out);
  const auto begin = [&](std::size_t l) { return first[l] + (left_out.empty() ? 0 : left_out[l]); };
  const std::int64_t free = cache->slots() - cache->used();
  const std::int64_t most = count.empty() ? 0 : *std::max_element(count.begin(), count.end());
  std::vector<std::int64_t> keys, hot;
  for (const std::int64_t n : count) hot.push_back(hot_of(n, hot_share));
  keys.reserve(static_cast<std::size_t>(std::max<std::int64_t>(0, free)));
  for (std::int64_t rank = 0; rank < most; ++rank) {
    for (std::size_t l = count.size(); l-- > 0;) {
      const std::int64_t key = begin(l) + rank;
      if (rank >= count[l]) continue;
      if (!cache->contains(key)) {
        if (static_cast<std::int64_t>(keys.size()) < free) keys.push_back(key);
      } else if (rank < hot[l]) {
        cache->fix(key, true);
      }
    }
  }
  cache->begin();
  std::reverse(keys.begin(), keys.end());
  for (const std::int64_t key : keys) {
    const auto l = static_cast<std::size_t>(std::upper_bound(first.begin(), first.end(), key) - first.begin() - 1);
    cache->insert(key, key - begin(l) < hot[l]);
  }
  return keys;
}

// What is fixed and not among the hot share of a cache of so many slots no longer is.
inline void release_hot(NeuronCache* cache, const std::vector<std::int64_t>& first, std::int64_t slots,
                        double hot_share, const std::vector<std::int64_t>& left_out = {}) {
  const std::vector<std::int64_t> count = shares(first, slots, left_out);
  for (std::size_t l = 0; l < count.size(); ++l) {
    const std::int64_t begin = first[l] + (left_out.empty() ? 0 : left_out[l]);
    for (std::int64_t key = first[l + 1] - 1; key >= begin + hot_of(count[l], hot_share); --key)
      if (cache->is_fixed(key)) cache->fix(key, false);  // the rarest first: the first to leave
  }
}

// Of a window of so many calls before this one: what none of them used leaves. `calls`: of this layer, when they were.
inline void leave_window(NeuronCache* cache, std::deque<std::int64_t>* calls, std::int64_t window, std::int64_t first,
                         std::int64_t last) {
  calls->push_back(cache->now());
  if (static_cast<std::int64_t>(calls->size()) > window + 1) calls->pop_front();
  cache->erase_older(first, last, calls->front());
}

}  // namespace pi2
