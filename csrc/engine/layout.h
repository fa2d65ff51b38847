// The file of an open store as the engine sees it: layers, cache keys of their slots, bytes to read. Constant once
// open.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/read_error.h"
#include "store/store_file.h"

namespace pi2 {

constexpr std::int64_t rounded(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

class Layout {
 public:
  Layout() = default;
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  ~Layout();

  // Returns "" or an error message. `map`: maps the file for the mmap engine.
  std::string open(const std::string& path, bool direct, bool map);

  const StoreFile& file() const { return file_; }
  const std::vector<StoreLayer>& layers() const { return file_.layers(); }
  std::int64_t count() const { return static_cast<std::int64_t>(layers().size()); }
  const StoreLayer& about(std::int64_t layer) const { return layers()[static_cast<std::size_t>(layer)]; }

  // Cache keys are slots of the file, numbered over all layers: the first key of each layer, then the number of keys.
  const std::vector<std::int64_t>& first_keys() const { return first_key_; }
  std::int64_t key_of(std::int64_t layer) const { return first_key_[static_cast<std::size_t>(layer)]; }
  std::int64_t keys() const { return first_key_.back(); }

  // Bytes read of a slot: its neurons, rounded up to the unit of reads, without the padding behind.
  std::int64_t read_bytes(const StoreLayer& l) const { return rounded(l.cluster * l.neuron_bytes(), file_.unit()); }
  ReadError check_neurons(std::int64_t layer, std::int64_t in_file, const char* data) const noexcept;

  // Of gates (StoreLayer::gates) from `page` on, which `bytes` have been read of.
  ReadError check_gates(std::int64_t layer, std::int64_t page, const char* data, std::int64_t bytes) const noexcept;

  const char* mapped() const { return mapped_; }  // null: not mapped

 private:
  StoreFile file_;
  std::vector<std::int64_t> first_key_;
  const char* mapped_ = nullptr;
};

}  // namespace pi2
