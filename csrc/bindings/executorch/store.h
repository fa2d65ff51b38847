// Open stores, shared by every layer, method and program of the process that reads the same file with the same options.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/arena.h"
#include "bindings/executorch/blob.h"
#include "bindings/executorch/engine.h"
#include "bindings/executorch/settings.h"
#include "pi2/offload.h"

namespace pi2::et {

// A tensor of the store in memory.
struct Bytes {
  Arena memory;
  std::int64_t size = 0;
};

class Store {
 public:
  // Opens the blob's store. Refuses one that is missing, truncated or damaged, or of another model or packing.
  static std::shared_ptr<Store> open(const Blob& blob, const Settings& settings, Problem* problem);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  Offload& offload() { return *offload_; }
  const std::string& path() const { return path_; }

  // Format of quantised rows.
  struct Rows {
    DType dtype = DType::kQ4;
    std::int64_t count = 0, columns = 0;
  };
  // Loads a tensor of the blob and checks it; callers share the memory. Null for a place without bytes. With `blocks`,
  // which describes its rows, stored in blocks (pi2/kernels.h).
  std::shared_ptr<const Bytes> tensor(const Place& place, const char* name, Problem* problem,
                                      const Rows* blocks = nullptr);

  // Called for every layer: tells from which neuron on decoding needs it. Neurons that no layer needs are not
  // preloaded.
  void add(const Blob& blob);
  void remove(const Blob& blob);
  // Fills the cache before the first call, when the layers of all loaded methods are known.
  void warm();

  // The engine for submitted layers, with `threads` threads unless the options say otherwise.
  Engine& engine(int threads);

  void count_submit_wait(std::int64_t nanoseconds);
  // One object of pi2_et_stats.
  std::string stats(bool reset);

 private:
  Store() = default;
  Problem set_up(const Blob& blob, const Settings& settings);
  Problem identify(const Blob& blob) const;

  std::string path_, key_;
  Settings settings_;
  int descriptor_ = -1;
  std::int64_t file_bytes_ = 0, header_bytes_ = 0;
  std::uint32_t header_checksum_ = 0;
  std::array<unsigned char, 32> model_hash_{};
  std::unique_ptr<Offload> offload_;
  bool tracing_ = false;

  std::mutex warming_;
  bool warm_ = false;

  std::mutex mutex_;                                                              // protects everything below
  std::map<std::pair<std::uint64_t, bool>, std::weak_ptr<const Bytes>> tensors_;  // by offset; in blocks?
  std::map<std::int64_t, std::multiset<std::int64_t>> first_;                     // by layer
  std::unique_ptr<Engine> engine_;  // destroyed first: its thread uses the members above
  std::int64_t submit_wait_ns_ = 0;
};

// JSON of all open stores, see pi2/executorch.h.
std::string all_stats(bool reset);

}  // namespace pi2::et
