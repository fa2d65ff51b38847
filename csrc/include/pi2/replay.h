// Which neurons a store's calls wanted, and what caches of other sizes and policies would have had of them. A replay
// runs the cache that runs in a store (cache/neuron_cache.h), without bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pi2 {

// Of each call of a layer (of a prompt: of each piece of it), in order.
struct Accesses {
  std::vector<std::int32_t> layers;
  // 1: streamed. What is read gets a slot of the cache only where one is free, or the call says so.
  std::vector<std::uint8_t> streamed;
  // Per call ceil(neurons / 8) bytes: bit i % 8 of byte i / 8 is set if neuron i was wanted. If streamed, as many
  // follow that say which are to be kept even so.
  std::vector<std::uint8_t> bits;
  std::int64_t wanted = 0, hits = 0;  // neurons, of the calls that are here
  std::int64_t lost = 0;              // calls that there was no room for
  bool whole = false;                 // nothing else has changed the cache since it was opened and filled: a replay
                                      // has the same hits
};

// What of Accesses a replay reads, wherever it is.
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
  // Neurons by layer that are fixed from the beginning (Offload::arrange), where there is room for them; empty: by
  // hot_share, with preload.
  std::vector<std::int64_t> fixed = {};
};

// Of one layer: neurons wanted, those of them that were there, and slots of the file that were not.
struct ReplayCounts {
  std::int64_t wanted = 0, hits = 0, missed = 0;
};

// Throws std::invalid_argument if the accesses are not of these layers.
void check_accesses(const AccessView& accesses, const std::vector<ReplayLayer>& layers);

// By layer. Throws std::invalid_argument, also for a policy that is not known.
std::vector<ReplayCounts> replay(const AccessView& accesses, const std::vector<ReplayLayer>& layers,
                                 const ReplayOptions& options);

// The most hits that any cache of options.slots can have that begins with the same keys, reads what is missing and
// knows what comes (Belady 1966, for calls that want many keys at a time). `policy` and `window` are not read.
std::vector<ReplayCounts> replay_optimal(const AccessView& accesses, const std::vector<ReplayLayer>& layers,
                                         const ReplayOptions& options);

}  // namespace pi2
