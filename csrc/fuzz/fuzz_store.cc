// Any bytes at all as a superblock, or as the beginning of a store: refused with a reason, or every layer lies in the
// file. As a file it is read as the core reads a store: the length of the safetensors header, the superblock behind it,
// and checksums.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "fuzz/input.h"

namespace {

using namespace pi2_fuzz;
using pi2::StoreLayer;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// What the core relies on wherever it reads a neuron.
void check(const std::vector<StoreLayer>& layers, std::int64_t first_data, std::int64_t file_bytes) {
  require(!layers.empty(), "no layer");
  for (const StoreLayer& l : layers) {
    require(l.neurons > 0 && l.hidden > 0 && l.rows > 0 && l.cluster > 0 && l.n_hot >= 0 && l.n_hot <= l.neurons,
            "numbers that make no sense");
    require(l.row_bytes == pi2::row_bytes(l.w_dtype, l.hidden), "rows of another length");
    require(l.down_bytes() == pi2::row_bytes(l.other_down ? l.down_dtype : l.w_dtype, l.hidden) && l.down_bytes() > 0,
            "down rows of another length");
    require(static_cast<__int128>(l.cluster) * l.neuron_bytes() <= l.slot_bytes, "neurons outside their slot");
    require(l.slots >= first_data && l.slots % pi2::kStorePage == 0 &&
                l.slots + static_cast<__int128>(l.n_slots()) * l.slot_bytes <= file_bytes,
            "slots outside the file");
    require(l.gates == 0 || (l.gates >= first_data && l.gates % pi2::kStorePage == 0 &&
                             l.gates + static_cast<__int128>(pi2::kStorePage) * l.gate_pages() <= file_bytes),
            "gates outside the file");
    require(l.checks >= first_data && l.checks + static_cast<__int128>(4) * (l.neurons + l.gate_pages()) <= file_bytes,
            "checksums outside the file");
  }
}

void parse(const std::vector<std::uint8_t>& bytes, std::int64_t start, std::int64_t file_bytes) {
  const auto length = static_cast<std::int64_t>(bytes.size());
  std::vector<StoreLayer> layers;
  const std::string wrong = pi2::parse_superblock(bytes.data(), length, start, file_bytes, &layers);
  if (wrong.empty())
    check(layers, start + length, file_bytes);
  else
    require(layers.empty(), "layers of what was refused");
}

// A file in memory, opened as any other.
void open_file(const std::vector<std::uint8_t>& begins, std::int64_t file_bytes) {
  static const int file = memfd_create("store", MFD_CLOEXEC);
  const std::size_t there = std::min(begins.size(), static_cast<std::size_t>(file_bytes));
  require(ftruncate(file, 0) == 0 && ftruncate(file, file_bytes) == 0 &&
              pwrite(file, begins.data(), there, 0) == static_cast<ssize_t>(there),
          "no file in memory");
  pi2::StoreFile store;
  if (!store.open("/proc/self/fd/" + std::to_string(file), false).empty()) return;
  check(store.layers(), 2 * pi2::kStorePage, file_bytes);
  for (std::size_t l = 0; l < store.layers().size(); ++l) {
    const StoreLayer& layer = store.layers()[l];
    const volatile std::uint32_t last =
        store.checks(static_cast<std::int64_t>(l))[layer.neurons + layer.gate_pages() - 1];
    (void)last;  // it was read: AddressSanitizer looks on
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < kPrefix) return 0;
  const bool sealed = (data[0] & kSealed) != 0, file = (data[0] & kFile) != 0;
  std::int64_t start, file_bytes;
  std::memcpy(&start, data + 1, 8);
  std::memcpy(&file_bytes, data + 9, 8);
  // Both are measured, not read: what a file can have.
  start &= (std::int64_t{1} << 40) - 1;
  file_bytes &= file ? kMostFile - 1 : (std::int64_t{1} << 62) - 1;
  std::vector<std::uint8_t> bytes(data + kPrefix, data + size);
  if (sealed) seal(&bytes, file_bytes);
  if (!file) {
    parse(bytes, start, file_bytes);
    return 0;
  }
  if (sealed) {  // behind the shortest header
    std::vector<std::uint8_t> header(static_cast<std::size_t>(pi2::kStorePage), ' ');
    put(&header, 0, header.size() - 8, 8);
    bytes.insert(bytes.begin(), header.begin(), header.end());
  }
  open_file(bytes, file_bytes);
  return 0;
}
