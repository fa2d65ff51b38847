// Records which neurons calls want (pi2/replay.h), up to a number of bytes.
#pragma once

#include <cstdint>
#include <new>
#include <utility>

#include "pi2/replay.h"

namespace pi2 {

class AccessLog {
 public:
  explicit AccessLog(std::int64_t most_bytes) : most_(most_bytes) {}

  // Adds one call. `each(use)` calls use(id) for every wanted neuron; `kept` (or null) has a mark for every neuron.
  // Calls that do not fit are counted as lost.
  template <class Each>
  void add(std::int64_t layer, std::int64_t neurons, bool streamed, const std::uint8_t* kept, std::int64_t hits,
           const Each& each) {
    const auto row = static_cast<std::size_t>((neurons + 7) / 8), before = all_.bits.size();
    if (static_cast<std::int64_t>(before + row * (streamed ? 2 : 1)) > most_) {
      ++all_.lost;
      return;
    }
    try {
      all_.bits.resize(before + row * (streamed ? 2 : 1), 0);
      all_.streamed.push_back(streamed);
      all_.layers.push_back(static_cast<std::int32_t>(layer));
    } catch (const std::bad_alloc&) {
      all_.bits.resize(before);
      all_.streamed.resize(all_.layers.size());
      ++all_.lost;
      return;
    }
    const auto set = [&](std::size_t start, std::int64_t i) {
      std::uint8_t& byte = all_.bits[start + static_cast<std::size_t>(i / 8)];
      byte = static_cast<std::uint8_t>(byte | 1u << (i % 8));
    };
    each([&](std::int64_t id) {
      set(before, id);
      ++all_.wanted;
    });
    if (streamed && kept != nullptr)
      for (std::int64_t i = 0; i < neurons; ++i)
        if (kept[i] != 0) set(before + row, i);
    all_.hits += hits;
  }

  Accesses take() { return std::move(all_); }

 private:
  std::int64_t most_;
  Accesses all_;
};

}  // namespace pi2
