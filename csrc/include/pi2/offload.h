// Feed-forward layers whose neurons are in a store on flash: a cache of neurons under a byte budget, and a pipeline in
// which chunks of neurons are computed while the neurons of others are read (PowerInfer-2, sections 4.2 to 4.4).
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

// Tokens of a call for which the next layer is guessed: prompts want nearly all of a layer.
constexpr std::int64_t kMostLookahead = 4;

struct OffloadOptions {
  std::int64_t cache_bytes =
      0;  // for neurons in memory; what a full cache has no room for (staging_bytes) comes on top
  std::string engine = "pread";  // pread, io_uring; mmap: computed where it is mapped, without a cache
  std::string policy = "lfu";    // cache/policies/list.inc has them
  int io_threads = 16;           // of pread; depth of io_uring
  bool direct = true;            // O_DIRECT where it works
  bool verify = true;            // checksums of everything read (not of what is mapped)
  bool pipeline = true;          // false: computing begins when every read of a layer is over
  bool spin = true;              // workers that wait for reads keep their cores for some milliseconds before they sleep
  std::int64_t window = 0;       // > 0: neurons not used in so many last tokens of their layer leave ("LLM in a flash")
  double hot_share = 0.5;        // of the cache: most frequent neurons that preload() puts there and nothing evicts
  std::int64_t in_flight = 8;    // chunks of a layer whose reads may be under way together
  std::int64_t run_bytes = 1 << 18;  // neighbours are read together, up to this
  std::int64_t gap_bytes = 1 << 14;  // between two that are wanted, bytes that are read through rather than left out
  // > 0: a neuron that is not in memory is left out if a low-rank predictor's score is less than this above its
  // threshold. Changes results. Of calls for fewer than kStreamFrom tokens.
  double miss_margin = 0;
  // > 0: an expert with less than this share of the weight of each of its tokens is left out of a mixture while fewer
  // than half of the slots that it wants are in memory; the one with most of a token's weight never is. Changes
  // results. Of calls for fewer than kStreamFrom tokens that have at most 64 experts in all.
  double drop_experts = 0;
  std::vector<double> device;  // not empty: reads take as long as this device's (io/device_model.h); simulated
};

// What one call did, or all of them.
struct CallStats {
  std::int64_t wanted = 0, hits = 0;       // neurons; hits: in memory already, and not because of a guess
  std::int64_t reads = 0, bytes_read = 0;  // that it has begun, for itself or ahead for another
  std::int64_t wait_ns = 0;                // of all workers, waiting for neurons
};

// Of all calls; reads besides of what was arranged and preloaded.
struct OffloadStats : CallStats {
  std::int64_t calls = 0;
  std::int64_t guessed = 0, used = 0;  // slots read because prefetch() asked; those of them that were wanted afterwards
  std::int64_t evictions = 0;
  std::int64_t uncached = 0;             // slots read for one use: the cache was full of what the same call wants
  std::int64_t busy_ns = 0;              // of all workers, from a call's beginning to its end
  std::int64_t io_ns = 0;                // with at least one read under way
  std::int64_t resident = 0, slots = 0;  // slots of the file in the cache now, and room for: mostly a neuron each
  std::int64_t cache_bytes = 0, staging_bytes = 0;  // what cannot be cached passes through staging
  std::int64_t left_out = 0;                        // neurons, because of miss_margin
  std::int64_t experts_left_out = 0;                // choices of an expert by a token, because of drop_experts
  std::int64_t late = 0;                            // of a simulated device: reads that took longer here than there
  // Slots of the file that nothing evicts, those on their way among them; and those that arrange() has still to look
  // for, or that are being read for it: 0 when all is as it asked for.
  std::int64_t fixed = 0, arranging = 0;
};

// One open store. Calls from several threads take turns. Not usable in a forked child, which has none of its threads:
// calls there fail.
class Offload {
 public:
  // Null and a reason, if the file is not a sound store or an option makes no sense.
  static std::unique_ptr<Offload> open(const std::string& path, const OffloadOptions& options, std::string* problem);
  ~Offload();

  std::int64_t layers() const;
  // Sizes of a layer as sparse_ffn wants them: hidden, neurons, rows, formats.
  FfnArgs shape(std::int64_t layer) const;

  // As predicted_ffn, with the neurons of a layer: the same bits. Returns "" or why reading failed; the next call may
  // work. `then`, if any, is called once on a thread of the call when all that this layer wants has been asked for, and
  // may call prefetch() only. To `stats`, if any, is added what this call did.
  std::string ffn(std::int64_t layer, const Predictor& predictor, FfnArgs args, const ParallelFor& parallel,
                  const std::function<void()>& then = nullptr, CallStats* stats = nullptr);

  // Begins to read what a layer is going to want into the cache: the first n_hot neurons and
  // of the others those with a mark in active [tokens, neurons - n_hot], all if null. Changes no result; what cannot be
  // read is asked for again when it is wanted. To `stats`, if any, are added its reads.
  void prefetch(std::int64_t layer, std::int64_t n_hot, const std::uint8_t* active, std::int64_t tokens,
                CallStats* stats = nullptr);

  // Whether fewer than half of the slots that a layer is going to want, as above, are in memory.
  bool mostly_missing(std::int64_t layer, std::int64_t n_hot, const std::uint8_t* active, std::int64_t tokens);
  // Counts `choices` of an expert by a token that are left out because of that.
  void leave_out_experts(std::int64_t choices);

  // The first so many neurons of each layer [layers] are somebody else's (FfnArgs::first): preload() begins after them,
  // and so does what is read ahead of prompts. Changes no result.
  void leave_out(const std::vector<std::int64_t>& first);

  // From now on the first resident[l] neurons of each layer [layers] (after what is left out; whole slots of the file)
  // are fixed: nothing evicts them. No others are, so that hot_share means nothing any more. Where there is no room for
  // all of them it is for the most frequent, of all layers alike. Another cache size than now, see resize(), takes
  // until the end of the layer that is being computed; else this returns at once. What is missing is read meanwhile, by
  // large reads, after those that calls wait for; what cannot be read is asked for again when it is wanted. Calling it
  // again replaces it. Changes no result. Returns "" or why nothing has changed.
  static constexpr std::int64_t kSameSize = -1;
  std::string arrange(const std::vector<std::int64_t>& resident, std::int64_t cache_bytes = kSameSize);

  // Fills free slots with the first neurons of every layer (a store is ordered by frequency), in large reads. What is
  // to be fixed comes first.
  std::string preload();

  // Between two calls: the cache gets another size, not above that with which it was opened. What has no room leaves,
  // as the policy says; its memory goes back to the system. Of the new size, hot_share is what may stay fixed, unless
  // arrange() has said what that is.
  std::string resize(std::int64_t cache_bytes, double hot_share);

  // Begins to write down what calls want, up to so many bytes; and ends it. Returns "" or why not.
  std::string record_accesses(std::int64_t most_bytes);
  Accesses take_accesses();

  OffloadStats stats(bool reset);
  double miss_margin() const;
  double drop_experts() const;
  // Engine in use, and whether reads are direct: "pread, direct"; "simulated device over pread, direct".
  std::string describe() const;

 private:
  struct State;
  explicit Offload(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace pi2
