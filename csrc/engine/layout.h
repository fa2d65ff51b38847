// An open store's file, as the pieces of the engine see it: layers, the keys of their slots, what is read of them. It
// does not change once it is open.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/wrong.h"
#include "store/store_file.h"

namespace pi2 {

constexpr std::int64_t rounded(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

class Layout {
 public:
  Layout() = default;
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  ~Layout();

  // "" or what is wrong. `map`: for reading where it lies in memory.
  std::string open(const std::string& path, bool direct, bool map);

  const StoreFile& file() const { return file_; }
  const std::vector<StoreLayer>& layers() const { return file_.layers(); }
  std::int64_t count() const { return static_cast<std::int64_t>(layers().size()); }
  const StoreLayer& about(std::int64_t layer) const { return layers()[static_cast<std::size_t>(layer)]; }

  // Keys of the cache are slots of the file; those of a layer begin with its first, and at [layers] there are so many.
  const std::vector<std::int64_t>& first_keys() const { return first_key_; }
  std::int64_t key_of(std::int64_t layer) const { return first_key_[static_cast<std::size_t>(layer)]; }
  std::int64_t keys() const { return first_key_.back(); }

  // What is read of a slot: its neurons, not the padding behind them.
  std::int64_t read_bytes(const StoreLayer& l) const { return rounded(l.cluster * l.neuron_bytes(), file_.unit()); }
  Wrong check_neurons(std::int64_t layer, std::int64_t in_file, const char* data) const noexcept;

  const char* mapped() const { return mapped_; }  // null: it is not

 private:
  StoreFile file_;
  std::vector<std::int64_t> first_key_;
  const char* mapped_ = nullptr;
};

}  // namespace pi2
