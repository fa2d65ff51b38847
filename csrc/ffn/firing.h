// Counts for pi2/firing.h. Off it costs one relaxed load a call; on, a lock at both ends of a call, and for a neuron
// that fires an addition to counters of two bytes: wide ones, 32 layers of which no cache holds, would be a fiftieth of
// what a predicted layer reads. They are emptied into wide ones before they can overflow.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "pi2/ffn.h"
#include "pi2/firing.h"

namespace pi2 {

// Layers that somebody watches.
extern std::atomic<std::int64_t> firing_watched;

struct FiringLane;
struct FiringLayer;

// Where the workers of a call count; each neuron is one worker's.
struct FiringCounters {
  float cut;
  int sizes;                           // those of which the call has groups, ascending
  std::int64_t size[kMostSizes];       // tokens
  std::uint64_t begins[kMostSizes];    // a bit for the first token of each group
  std::uint16_t* fired;                // [neurons]
  std::uint16_t* grouped[kMostSizes];  // [neurons]

  // Before add, by some microseconds: what is counted in rarely stays in a cache from one call to the next.
  void expect(std::int64_t neuron) const {
    __builtin_prefetch(fired + neuron, 1);
    for (int k = 0; k < sizes; ++k) __builtin_prefetch(grouped[k] + neuron, 1);
  }

  // `tokens`: a bit for each for which the neuron fired. Of a call with groups all of its tokens, else any 64 of them.
  void add(std::int64_t neuron, std::uint64_t tokens) const {
    fired[neuron] = static_cast<std::uint16_t>(fired[neuron] + __builtin_popcountll(tokens));
    std::uint64_t any = tokens;  // bit p: for one of `width` tokens from p on
    std::int64_t width = 1;
    for (int k = 0; k < sizes; ++k) {
      for (; 2 * width <= size[k]; width *= 2) any |= any >> width;
      const std::uint64_t groups = (any | any >> (size[k] - width)) & begins[k];
      grouped[k][neuron] = static_cast<std::uint16_t>(grouped[k][neuron] + __builtin_popcountll(groups));
    }
  }
};

// The life of one call of sparse_ffn, on the thread that called.
class FiringCall {
 public:
  explicit FiringCall(const FfnArgs& args) : lane_(nullptr) {
    if (firing_watched.load(std::memory_order_relaxed) != 0) begin(args);
  }
  FiringCall(const FiringCall&) = delete;
  FiringCall& operator=(const FiringCall&) = delete;
  ~FiringCall() {
    if (lane_ != nullptr) end();
  }

  // Counters for the next so many tokens, at most 65535; null: nobody watches the layer. Between two of these only what
  // a call of parallel.run has begun may count.
  const FiringCounters* next(std::int64_t tokens) {
    if (lane_ == nullptr) return nullptr;
    make_room(tokens);
    return &counters_;
  }

 private:
  void begin(const FfnArgs& args);
  void make_room(std::int64_t tokens);
  void end();

  FiringLane* lane_;
  std::shared_ptr<FiringLayer> layer_;
  std::int64_t tokens_;
  FiringCounters counters_;  // only while counting
};

}  // namespace pi2
