// What a store does with its cache besides look-ups. Replays use the same functions, so that they reproduce its hits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "cache/neuron_cache.h"

namespace pi2 {

// Divides `slots` over the layers, in proportion to their keys. Layer l has the keys first[l] .. first[l + 1] - 1, the
// most frequent first; the first left_out[l] of them are computed elsewhere (an empty left_out: none).
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

// How many of a layer's share of the cache are fixed.
inline std::int64_t hot_of(std::int64_t share, double hot_share) {
  std::int64_t hot = 0;
  while (hot < share && static_cast<double>(hot) < hot_share * static_cast<double>(share)) ++hot;
  return hot;
}

// How many keys of each layer are fixed in a cache of `slots` slots.
inline std::vector<std::int64_t> hot_counts(const std::vector<std::int64_t>& first, std::int64_t slots,
                                            double hot_share, const std::vector<std::int64_t>& left_out = {}) {
  std::vector<std::int64_t> hot = shares(first, slots, left_out);
  for (std::int64_t& n : hot) n = hot_of(n, hot_share);
  return hot;
}

// Reduces `wanted` (keys by layer) to what fits into `slots`: the most frequent keys first, rank by rank over all
// layers, and within the last rank the last layers first.
inline std::vector<std::int64_t> fitting(std::vector<std::int64_t> wanted, std::int64_t slots) {
  const auto up_to = [&](std::int64_t rank) {
    std::int64_t sum = 0;
    for (const std::int64_t n : wanted) sum += std::min(n, rank);
    return sum;
  };
  std::int64_t fits = 0, most = wanted.empty() ? 0 : *std::max_element(wanted.begin(), wanted.end());
  if (up_to(most) <= slots) return wanted;
  while (most - fits > 1) {
    const std::int64_t rank = fits + (most - fits) / 2;
    (up_to(rank) <= slots ? fits : most) = rank;
  }
  std::int64_t left = slots - up_to(fits);
  for (std::size_t l = wanted.size(); l-- > 0;) {
    if (wanted[l] <= fits) continue;
    wanted[l] = fits + (left > 0);
    left -= left > 0;
  }
  return wanted;
}

// The keys that a cache of `slots` slots is filled with, the most frequent first: the first hot[l] keys of each layer,
// which are fixed; with `rest` also other keys of each layer's share, as far as there is room.
inline std::vector<std::int64_t> filling(const std::vector<std::int64_t>& first, std::int64_t slots,
                                         const std::vector<std::int64_t>& hot, bool rest,
                                         const std::vector<std::int64_t>& left_out = {}) {
  const std::vector<std::int64_t> count = shares(first, slots, left_out);
  std::vector<std::int64_t> keys;
  keys.reserve(static_cast<std::size_t>(std::min(slots, first.back())));
  const auto add = [&](bool others) {
    std::int64_t most = 0;
    for (std::size_t l = 0; l < count.size(); ++l) most = std::max(most, others ? count[l] : hot[l]);
    for (std::int64_t rank = 0; rank < most; ++rank) {
      for (std::size_t l = count.size(); l-- > 0 && static_cast<std::int64_t>(keys.size()) < slots;) {
        if (others ? rank >= hot[l] && rank < count[l] : rank < hot[l])
          keys.push_back(first[l] + (left_out.empty() ? 0 : left_out[l]) + rank);
      }
    }
  };
  add(false);
  if (rest) add(true);
  return keys;
}

// Inserts keys of filling() into the free slots of the cache and returns the inserted ones; hot keys are fixed, also
// those that were in the cache before. The most frequent are inserted last, so that they are evicted last.
inline std::vector<std::int64_t> insert_first(NeuronCache* cache, const std::vector<std::int64_t>& first,
                                              const std::vector<std::int64_t>& hot, bool rest = true,
                                              const std::vector<std::int64_t>& left_out = {}) {
  const auto is_hot = [&](std::int64_t key) {
    const auto l = static_cast<std::size_t>(std::upper_bound(first.begin(), first.end(), key) - first.begin() - 1);
    return key - first[l] - (left_out.empty() ? 0 : left_out[l]) < hot[l];
  };
  const std::int64_t free = cache->slots() - cache->used();
  std::vector<std::int64_t> keys;
  for (const std::int64_t key : filling(first, cache->slots(), hot, rest, left_out)) {
    if (!cache->contains(key)) {
      if (static_cast<std::int64_t>(keys.size()) < free) keys.push_back(key);
    } else if (is_hot(key)) {
      cache->fix(key, true);
    }
  }
  cache->begin();
  std::reverse(keys.begin(), keys.end());
  for (const std::int64_t key : keys) cache->insert(key, is_hot(key));
  return keys;
}

// Unfixes keys that do not belong to the hot share of a cache of `slots` slots.
inline void release_hot(NeuronCache* cache, const std::vector<std::int64_t>& first, std::int64_t slots,
                        double hot_share, const std::vector<std::int64_t>& left_out = {}) {
  const std::vector<std::int64_t> hot = hot_counts(first, slots, hot_share, left_out);
  for (std::size_t l = 0; l < hot.size(); ++l) {
    const std::int64_t begin = first[l] + (left_out.empty() ? 0 : left_out[l]);
    for (std::int64_t key = first[l + 1] - 1; key >= begin + hot[l]; --key)
      if (cache->is_fixed(key)) cache->fix(key, false);  // the rarest first, so that they are evicted first
  }
}

// Evicts the keys [first, last) that no call within the window used. `calls`: times of this layer's last calls.
inline void leave_window(NeuronCache* cache, std::deque<std::int64_t>* calls, std::int64_t window, std::int64_t first,
                         std::int64_t last) {
  calls->push_back(cache->now());
  if (static_cast<std::int64_t>(calls->size()) > window + 1) calls->pop_front();
  cache->erase_older(first, last, calls->front());
}

}  // namespace pi2
