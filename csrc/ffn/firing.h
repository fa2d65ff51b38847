// Counting for pi2/firing.h. Off, it costs one relaxed load per call. On, a lock at both ends of a call, and for each
// neuron that fires an addition to a two-byte counter. (Wide counters of 32 layers fit no cache: they would add a
// fiftieth of what a predicted layer reads.) Narrow counters are added to wide ones before they can overflow.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "pi2/ffn.h"
#include "pi2/firing.h"

namespace pi2 {

// Number of watched layers.
extern std::atomic<std::int64_t> firing_watched;

struct FiringLane;
struct FiringLayer;

// The counters of a call. Each neuron is counted by one worker.
struct FiringCounters {
  float cut;
  int sizes;                           // number of group sizes that the call counts, ascending
  std::int64_t size[kMostSizes];       // tokens
  std::uint64_t begins[kMostSizes];    // a bit for the first token of each group
  std::uint16_t* fired;                // [neurons]
  std::uint16_t* grouped[kMostSizes];  // [neurons]

  // Prefetches the counters, some microseconds before add: they rarely stay in a cache from call to call.
  void expect(std::int64_t neuron) const {
    __builtin_prefetch(fired + neuron, 1);
    for (int k = 0; k < sizes; ++k) __builtin_prefetch(grouped[k] + neuron, 1);
  }

  // `tokens`: one bit per token for which the neuron fired: all tokens of a call with groups, else any 64 of them.
  void add(std::int64_t neuron, std::uint64_t tokens) const {
    fired[neuron] = static_cast<std::uint16_t>(fired[neuron] + __builtin_popcountll(tokens));
    std::uint64_t any = tokens;  // bit p: it fired for one of the `width` tokens from p on
    std::int64_t width = 1;
    for (int k = 0; k < sizes; ++k) {
      for (; 2 * width <= size[k]; width *= 2) any |= any >> width;
      const std::uint64_t groups = (any | any >> (size[k] - width)) & begins[k];
      grouped[k][neuron] = static_cast<std::uint16_t>(grouped[k][neuron] + __builtin_popcountll(groups));
    }
  }
};

// Scope of one call of sparse_ffn, on the calling thread.
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

  // Counters for the next `tokens` tokens, at most 65535; null: the layer is not watched. Only a parallel.run that
  // starts after this may use them, and only until the next call of this.
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
  FiringCounters counters_;  // valid while counting
};

}  // namespace pi2
