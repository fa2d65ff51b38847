#include "engine/layout.h"

#include <sys/mman.h>

#include <algorithm>

#include "base/crc32c.h"

namespace pi2 {

Layout::~Layout() {
  if (mapped_ != nullptr) munmap(const_cast<char*>(mapped_), static_cast<std::size_t>(file_.file_bytes()));
}

std::string Layout::open(const std::string& path, bool direct, bool map) {
  const std::string wrong = file_.open(path, direct && !map);
  if (!wrong.empty()) return wrong;
  std::int64_t keys = 0;
  for (const StoreLayer& l : layers()) {
    first_key_.push_back(keys);
    keys += l.n_slots();
  }
  first_key_.push_back(keys);
  if (keys >= std::int64_t{1} << 31) return std::to_string(keys) + " slots, more than a cache can name";
  if (!map) return "";
  const auto bytes = static_cast<std::size_t>(file_.file_bytes());
  void* at = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file_.plain_descriptor(), 0);
  if (at == MAP_FAILED) return "the file cannot be mapped";
  mapped_ = static_cast<const char*>(at);
  madvise(at, bytes, MADV_RANDOM);
  return "";
}

ReadError Layout::check_neurons(std::int64_t layer, std::int64_t in_file, const char* data) const noexcept {
  const StoreLayer& l = about(layer);
  const std::int64_t first = in_file * l.cluster;
  for (std::int64_t id = first; id < std::min(first + l.cluster, l.neurons); ++id)
    if (crc32c(data + (id - first) * l.neuron_bytes(), static_cast<std::size_t>(l.neuron_bytes())) !=
        file_.checks(layer)[id])
      return {"its checksum does not match", 0, layer, id, 0, l.slots + in_file * l.slot_bytes};
  return {};
}

ReadError Layout::check_gates(std::int64_t layer, std::int64_t page, const char* data,
                              std::int64_t bytes) const noexcept {
  const StoreLayer& l = about(layer);
  for (std::int64_t at = page * kStorePage; bytes > 0; ++page, at += kStorePage, bytes -= kStorePage) {
    const std::int64_t size = std::min(kStorePage, l.gate_bytes() - at);
    if (size <= 0) break;
    if (crc32c(data, static_cast<std::size_t>(size)) != file_.checks(layer)[l.neurons + page])
      return {"its checksum does not match", 0, layer, at / l.row_bytes, 0, l.gates + at};
    data += kStorePage;
  }
  return {};
}

}  // namespace pi2
