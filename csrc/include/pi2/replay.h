// Records of which neurons the calls of a store wanted, and replays of them: the hits of caches of other sizes and
// policies. A replay runs the cache of a store (cache/neuron_cache.h), without bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pi2 {

// One entry for each call of a layer (for a prompt: for each chunk of it), in order.
struct Accesses {
  std::vector<std::int32_t> layers;
  // 1: streamed. A neuron that is read is cached only if a slot is free or the call marks it.
  std::vector<std::uint8_t> streamed;
  // Per call ceil(neurons / 8) bytes: bit i % 8 of byte i / 8 is set if neuron i was wanted. A streamed call has as
  // many further bytes: the neurons to be cached all the same.
  std::vector<std::uint8_t> bits;
  std::int64_t wanted = 0, hits = 0;  // neurons, over the recorded calls
  std::int64_t lost = 0;              // calls that did not fit
  bool whole = false;                 // nothing else changed the cache since it was opened and filled: a replay has the
                                      // same hits
};

// The fields of Accesses that a replay reads, in any memory.
struct AccessView {
  const std::int32_t* layers = nullptr;
  const std::uint8_t* streamed = nullptr;
  std::int64_t calls = 0;
  const std::uint8_t* bits = nullptr;
  std::int64_t n_bits = 0;  // bytes
};

struct ReplayLayer {
  std::int64_t neurons = 0, cluster = 1;  // neurons in a slot of the file
};

struct ReplayOptions {
  std::string policy = "lru";
  std::int64_t slots = 0;
  double hot_share = 0.5;
  bool preload = true;
  std::int64_t window = 0;
  // Neurons of each layer that are fixed from the start (Offload::arrange), as far as they fit; empty: by hot_share,
  // with preload.
  std::vector<std::int64_t> fixed = {};
};

// Counts of one layer: neurons wanted, those in the cache, and slots of the file that were missing.
struct ReplayCounts {
  std::int64_t wanted = 0, hits = 0, missed = 0;
};

// Throws std::invalid_argument if the accesses are not of these layers.
void check_accesses(const AccessView& accesses, const std::vector<ReplayLayer>& layers);

// Returns counts by layer. Throws std::invalid_argument, also for an unknown policy.
std::vector<ReplayCounts> replay(const AccessView& accesses, const std::vector<ReplayLayer>& layers,
                                 const ReplayOptions& options);

// What a replay does whatever its policy is, for policies outside of this library.
struct ReplayWork {
  std::vector<std::int64_t> filled;  // pairs: a key that is inserted before the first call, and whether it is fixed
  std::vector<std::int64_t> wanted;  // triples, of all calls: a key, how many of its neurons are wanted, and whether it
                                     // may evict others (or a call streams, and keeps it where a slot is free)
  std::vector<std::int64_t> ends;    // where each call ends among these triples
};
ReplayWork replay_work(const AccessView& accesses, const std::vector<ReplayLayer>& layers,
                       const ReplayOptions& options);

// The most hits that any cache of options.slots can have that starts with the same keys, reads what is missing and
// knows the future (Belady 1966, for calls that want many keys at a time). Ignores `policy` and `window`.
std::vector<ReplayCounts> replay_optimal(const AccessView& accesses, const std::vector<ReplayLayer>& layers,
                                         const ReplayOptions& options);

}  // namespace pi2
