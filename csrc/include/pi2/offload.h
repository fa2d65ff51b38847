// Feed-forward layers whose neurons are in a store on flash: a neuron cache with a byte budget, and a pipeline that
// computes some chunks of neurons while it reads others (PowerInfer-2, sections 4.2 to 4.4).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pi2/ffn.h"
#include "pi2/predict.h"
#include "pi2/replay.h"

namespace pi2 {

// Calls of at most this many tokens prefetch for the next layer; prompts need nearly all of a layer anyway.
constexpr std::int64_t kMostLookahead = 4;

struct OffloadOptions {
  std::int64_t cache_bytes =
      0;  // memory for neurons; staging_bytes, for neurons that do not fit the full cache, come on top
  std::string engine = "pread";      // pread, io_uring; mmap: computed from the mapped file, without a cache
  std::string policy = "lfu";        // one of cache/policies/list.inc
  int io_threads = 16;               // threads of pread; queue depth of io_uring
  bool direct = true;                // O_DIRECT where it works
  bool verify = true;                // checks the checksum of every neuron read (not with mmap)
  bool pipeline = true;              // false: a layer is computed when all its reads have ended
  bool spin = true;                  // workers that wait for reads spin for some milliseconds before they sleep
  std::int64_t window = 0;           // > 0: evicts neurons unused in this many last tokens ("LLM in a flash")
  double hot_share = 0.5;            // share of the cache for the most frequent neurons, which are never evicted
  std::int64_t in_flight = 8;        // chunks of a layer that may have reads in flight at once
  std::int64_t run_bytes = 1 << 18;  // neighbouring slots are one read, up to this size
  std::int64_t gap_bytes = 1 << 14;  // gaps up to this size are read and discarded rather than split the read
  // > 0: skips a neuron that is not in memory if its low-rank score exceeds the threshold by less than this. Lossy.
  // Only in calls of fewer than kStreamFrom tokens.
  double miss_margin = 0;
  // > 0: skips an expert whose share of the routing weight is below this for each of its tokens, if fewer than half of
  // the slots that it needs are in memory. A token's heaviest expert is never skipped. Lossy. Only in calls of fewer
  // than kStreamFrom tokens and at most 64 pairs of a token and an expert.
  double drop_experts = 0;
  std::vector<double> device;  // not empty: reads take as long as on this simulated device (io/device_model.h)
};

// What one call did, or all calls.
struct CallStats {
  std::int64_t wanted = 0, hits = 0;       // neurons; hits: already in memory, not counting prefetched ones
  std::int64_t reads = 0, bytes_read = 0;  // started by the call, for itself or ahead
  std::int64_t wait_ns = 0;                // summed over workers: waiting for neurons
};

// Totals of all calls; reads include those of preload() and of the hot set.
struct OffloadStats : CallStats {
  std::int64_t calls = 0;
  std::int64_t guessed = 0, used = 0;  // slots that were prefetched; those of them that were then used
  std::int64_t evictions = 0;
  std::int64_t uncached = 0;  // slots read for one use only, because the cache was full of neurons of the same call
  std::int64_t busy_ns = 0;   // summed over workers: from a call's beginning to its end
  std::int64_t io_ns = 0;     // time with at least one read in flight
  std::int64_t resident = 0,
               slots = 0;  // slots of the file in the cache now, and its capacity; usually one neuron each
  std::int64_t cache_bytes = 0, staging_bytes = 0;  // staging: memory for slots that do not fit the cache
  std::int64_t left_out = 0;                        // neurons skipped because of miss_margin
  std::int64_t experts_left_out = 0;                // (token, expert) pairs skipped because of drop_experts
  std::int64_t late = 0;                            // reads that took longer here than on the simulated device
  // Slots that are never evicted, including those in flight; and slots that arrange() has still to load: 0 when the hot
  // set is complete.
  std::int64_t fixed = 0, arranging = 0;
};

// Gates of a layer that are being read, or have been; see Offload::ask_for_gates().
struct GateBuffer;
using StoredGates = std::shared_ptr<GateBuffer>;

// So many experts' gates are read ahead.
constexpr std::int64_t kGateBuffers = 8;

// One open store. Calls from several threads take turns. A forked child cannot use it, because it has none of the
// threads: calls there fail.
class Offload {
 public:
  // Returns null and sets `problem` if the file is damaged or an option is invalid.
  static std::unique_ptr<Offload> open(const std::string& path, const OffloadOptions& options, std::string* problem);
  ~Offload();

  std::int64_t layers() const;
  // The sizes of a layer, for sparse_ffn: hidden, neurons, rows, formats.
  FfnArgs shape(std::int64_t layer) const;

  // As predicted_ffn with the layer's neurons; same bits. Returns "" or why reading failed; the next call may work.
  // `then`, if set, is called once on a thread of the call, after all reads of the layer are submitted; it may only
  // call prefetch(). The figures of the call are added to `stats`, if set.
  std::string ffn(std::int64_t layer, const Predictor& predictor, FfnArgs args, const ParallelFor& parallel,
                  const std::function<void()>& then = nullptr, CallStats* stats = nullptr);

  // Whether the first rows of a layer's neurons lie apart from its slots, and have to be read for every call.
  bool gates_apart(std::int64_t layer) const;
  // Starts to read them; null without memory, or where they need not be read. gates_there() waits for them, and returns
  // null if they cannot be read; ffn() takes them as FfnArgs::gate_rows, and reads them itself if it is not given them.
  StoredGates ask_for_gates(std::int64_t layer, CallStats* stats = nullptr);
  const char* gates_there(const StoredGates& gates, std::string* problem);

  // Starts to read neurons that a layer will need into the cache: the first n_hot, and of the others those marked in
  // active [tokens, neurons - n_hot]; all of them if null. Changes no result; a neuron that cannot be read now is read
  // by the call that needs it. Its reads are added to `stats`, if set.
  void prefetch(std::int64_t layer, std::int64_t n_hot, const std::uint8_t* active, std::int64_t tokens,
                CallStats* stats = nullptr);

  // Whether fewer than half of the slots that a layer will need (see prefetch) are in memory.
  bool mostly_missing(std::int64_t layer, std::int64_t n_hot, const std::uint8_t* active, std::int64_t tokens);
  // Counts (token, expert) pairs that were skipped for this reason.
  void leave_out_experts(std::int64_t choices);

  // first [layers]: the first neurons of each layer are computed elsewhere (FfnArgs::first). preload() and read-ahead
  // skip them. Changes no result.
  void leave_out(const std::vector<std::int64_t>& first);

  // Sets the hot set: the first resident[l] neurons of each layer [layers], after those left out, in whole slots of the
  // file. They are never evicted, and no others are fixed: hot_share no longer applies. If they do not all fit, the
  // most frequent of all layers do. Returns at once, except with a new cache size (see resize()), which waits for the
  // layer that is being computed. Missing neurons are read in the background by large reads, with lower priority than
  // those of calls; what cannot be read now is read by the call that needs it. Replaces an earlier hot set. Changes no
  // result. Returns "" or why nothing has changed.
  static constexpr std::int64_t kSameSize = -1;
  std::string arrange(const std::vector<std::int64_t>& resident, std::int64_t cache_bytes = kSameSize);

  // Fills free slots with the first neurons of every layer (a store is ordered by frequency), in large reads, the hot
  // set first.
  std::string preload();

  // Resizes the cache between two calls, up to the size with which it was opened. The policy chooses what is evicted;
  // memory goes back to the system. hot_share of the new size may stay fixed, unless arrange() has set the hot set.
  std::string resize(std::int64_t cache_bytes, double hot_share);

  // Records which neurons calls need, up to most_bytes, until take_accesses(). Returns "" or an error message.
  std::string record_accesses(std::int64_t most_bytes);

  // From now on the cache evicts the neuron of the least value, whatever the policy; neurons that were given none have
  // 0, and a cluster the greatest of its own. Sets the values of a layer's neurons, all of them; null: of all layers
  // none, so that the policy decides. Takes 4 bytes a neuron. Returns "" or an error message.
  std::string prioritise(std::int64_t layer, const float* values);
  Accesses take_accesses();

  OffloadStats stats(bool reset);
  double miss_margin() const;
  double drop_experts() const;
  // The engine in use, and whether reads are direct: "pread, direct"; "simulated device over pread, direct".
  std::string describe() const;

 private:
  struct State;
  explicit Offload(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace pi2
