#include "store/store_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/crc32c.h"
#include "io/read_fully.h"
#include "pi2/ffn.h"

namespace pi2 {
namespace {

constexpr char kMagic[8] = {'P', 'I', '2', 'S', 'T', 'O', 'R', 'E'};
// 1: a slot for every neuron; 2: all rows in one format; 3: whole layers; 4: all rows in slots
constexpr std::uint32_t kVersion = 5;
constexpr std::uint32_t kMostCluster = 64, kChunkUnit = 64;
constexpr std::int64_t kHead = 128, kEntry = 128;
constexpr std::int64_t kMostHeader = 100000000;  // of a safetensors file
constexpr std::int64_t kMostSuperblock = 1 << 26;
constexpr std::int64_t kDirectUnit = 512;  // O_DIRECT reads are multiples of this

std::uint32_t u32(const unsigned char* p) {
  return static_cast<std::uint32_t>(p[0]) | static_cast<std::uint32_t>(p[1]) << 8 |
         static_cast<std::uint32_t>(p[2]) << 16 | static_cast<std::uint32_t>(p[3]) << 24;
}

std::uint64_t u64(const unsigned char* p) { return u32(p) | static_cast<std::uint64_t>(u32(p + 4)) << 32; }

std::string text(std::uint64_t value) { return std::to_string(value); }

// The formats of a layer's rows: one for all, or one for gate and up and one for down.
std::string parse_formats(std::uint32_t code, std::uint32_t down, std::uint64_t hidden, StoreLayer* layer) {
  if (down == 0 ? !is_dtype_of_neurons(code) : !is_pair_of_neurons(code, down, 0))
    return "weights of kind " + text(code) + (down == 0 ? "" : " and " + text(down));
  layer->w_dtype = static_cast<DType>(code);
  if (down != 0 && !is_pair_of_neurons(code, down, hidden))
    return "rows of " + text(hidden) + " numbers in blocks of " + std::to_string(ggml_block(layer->w_dtype).numbers);
  layer->down_dtype = static_cast<DType>(down);
  layer->other_down = down != 0;
  return "";
}

std::string parse_layer(const unsigned char* p, std::uint32_t version, std::int64_t first_data, std::int64_t file_bytes,
                        StoreLayer* layer) {
  const auto end = static_cast<std::uint64_t>(file_bytes);
  const std::uint64_t slots = u64(p), checks = u64(p + 8), neurons = u32(p + 16), hidden = u32(p + 20);
  const std::uint64_t rows = u32(p + 24), slot_bytes = u32(p + 32), bytes_of_row = u32(p + 36), n_hot = u32(p + 40);
  const std::uint64_t cluster = version == 1 ? 1 : u32(p + 48);
  const std::string wrong = parse_formats(u32(p + 28), version < 3 ? 0 : u32(p + 52), hidden, layer);
  if (!wrong.empty()) return wrong;
  if (neurons == 0 || hidden == 0 || (rows != 2 && rows != 3))
    return text(neurons) + " neurons of " + text(rows) + " rows of " + text(hidden);
  if (bytes_of_row != static_cast<std::uint64_t>(row_bytes(layer->w_dtype, static_cast<std::int64_t>(hidden))))
    return "rows of " + text(bytes_of_row) + " bytes for " + text(hidden) + " numbers";
  const std::uint64_t bytes_of_down = version < 3 ? 0 : u32(p + 56);
  const std::int64_t down_bytes =
      layer->other_down ? row_bytes(layer->down_dtype, static_cast<std::int64_t>(hidden)) : 0;
  if (bytes_of_down != static_cast<std::uint64_t>(down_bytes))
    return "down rows of " + text(bytes_of_down) + " bytes for " + text(hidden) + " numbers";
  const std::uint64_t gates = version < 5 ? 0 : u64(p + 64), first_rows = rows - (gates == 0 ? 1 : 2);
  const std::uint64_t bytes_of_neuron = first_rows * bytes_of_row + (layer->other_down ? bytes_of_down : bytes_of_row);
  // A power of two up to 64 divides every chunk, so that no slot is in two chunks.
  if (cluster == 0 || cluster > kMostCluster || (cluster & (cluster - 1)) != 0)
    return "clusters of " + text(cluster) + " neurons";
  if (slot_bytes < cluster * bytes_of_neuron || slot_bytes % kDirectUnit != 0)
    return "slots of " + text(slot_bytes) + " bytes for " + (cluster == 1 ? "" : text(cluster) + " ") + "neurons of " +
           text(bytes_of_neuron);
  const std::uint64_t chunk = version < 4 ? 0 : u32(p + 60);
  if (chunk != 0 && (chunk % kChunkUnit != 0 || (neurons + chunk - 1) / chunk > static_cast<std::uint64_t>(kChunks)))
    return "chunks of " + text(chunk) + " neurons, of which there are " + text(neurons);
  const std::uint64_t n_slots = (neurons + cluster - 1) / cluster;
  if (n_hot > neurons) return text(n_hot) + " hot of " + text(neurons) + " neurons";
  // Both factors fit into 32 bits, so their product fits into 64; compared without adding, which could overflow.
  if (slots % kStorePage != 0 || slots < static_cast<std::uint64_t>(first_data) || slots > end ||
      n_slots * slot_bytes > end - slots)
    return text(n_slots) + " slots of " + text(slot_bytes) + " bytes at " + text(slots) + " in a file of " + text(end);
  constexpr auto kPage = static_cast<std::uint64_t>(kStorePage);
  const std::uint64_t pages = gates == 0 ? 0 : (neurons * bytes_of_row + kPage - 1) / kPage;
  if (gates != 0 && (gates % kPage != 0 || gates < static_cast<std::uint64_t>(first_data) || gates > end ||
                     pages > (end - gates) / kPage))
    return text(pages) + " pages of gates at " + text(gates) + " in a file of " + text(end);
  if (checks < static_cast<std::uint64_t>(first_data) || checks > end || 4 * (neurons + pages) > end - checks)
    return text(neurons + pages) + " checksums at " + text(checks) + " in a file of " + text(end);
  layer->slots = static_cast<std::int64_t>(slots);
  layer->checks = static_cast<std::int64_t>(checks);
  layer->neurons = static_cast<std::int64_t>(neurons);
  layer->hidden = static_cast<std::int64_t>(hidden);
  layer->rows = static_cast<std::int64_t>(rows);
  layer->slot_bytes = static_cast<std::int64_t>(slot_bytes);
  layer->row_bytes = static_cast<std::int64_t>(bytes_of_row);
  layer->n_hot = static_cast<std::int64_t>(n_hot);
  layer->number = static_cast<std::int64_t>(u32(p + 44));
  layer->cluster = static_cast<std::int64_t>(cluster);
  layer->chunk = static_cast<std::int64_t>(chunk);
  layer->gates = static_cast<std::int64_t>(gates);
  return "";
}

std::string problem(const char* what, int error) { return std::string(what) + ": " + std::strerror(error); }

}  // namespace

std::string parse_superblock(const void* data, std::int64_t bytes, std::int64_t start, std::int64_t file_bytes,
                             std::vector<StoreLayer>* layers) {
  const auto* p = static_cast<const unsigned char*>(data);
  layers->clear();
  if (bytes < kHead) return "a superblock of " + std::to_string(bytes) + " bytes";
  if (std::memcmp(p, kMagic, sizeof(kMagic)) != 0) return "no superblock where the data begins (not a store?)";
  const std::uint32_t version = u32(p + 8);
  if (version < 1 || version > kVersion)
    return "version " + text(version) + " where this library knows 1 to " + text(kVersion);
  const std::uint64_t size = u64(p + 16), count = u32(p + 32);
  if (size != static_cast<std::uint64_t>(bytes) || size % kStorePage != 0)
    return "a superblock of " + text(size) + " bytes, of which there are " + std::to_string(bytes);
  std::vector<unsigned char> copy(p, p + bytes);
  std::memset(copy.data() + 12, 0, 4);
  if (crc32c(copy.data(), copy.size()) != u32(p + 12)) return "a superblock whose checksum does not match";
  if (u64(p + 24) != static_cast<std::uint64_t>(file_bytes))
    return std::to_string(file_bytes) + " bytes where the superblock says " + text(u64(p + 24));
  if (u32(p + 36) != static_cast<std::uint32_t>(kStorePage)) return "pages of " + text(u32(p + 36)) + " bytes";
  if (count == 0 || count > static_cast<std::uint64_t>((bytes - kHead) / kEntry))
    return text(count) + " layers in a superblock of " + std::to_string(bytes) + " bytes";
  for (std::uint64_t i = 0; i < count; ++i) {
    StoreLayer layer;
    const std::string wrong =
        parse_layer(p + kHead + static_cast<std::int64_t>(i) * kEntry, version, start + bytes, file_bytes, &layer);
    if (!wrong.empty()) {
      layers->clear();
      return "layer " + text(i) + ": " + wrong;
    }
    layers->push_back(layer);
  }
  return "";
}

// Some file systems accept O_DIRECT and fail, or return wrong bytes, at the first read; some devices only read pages.
// Reads a page with known bytes in pieces of `unit`.
bool StoreFile::direct_works(const void* known, std::int64_t start, std::int64_t unit) const {
  const std::unique_ptr<void, decltype(&std::free)> page(std::aligned_alloc(kStorePage, kStorePage), &std::free);
  if (page == nullptr) return false;
  auto* to = static_cast<char*>(page.get());
  for (std::int64_t at = 0; at < kStorePage; at += unit)
    if (read_fully(direct_, to + at, unit, start + at) != 0) return false;
  return std::memcmp(to, known, kStorePage) == 0;
}

StoreFile::~StoreFile() {
  if (plain_ >= 0) close(plain_);
  if (direct_ >= 0) close(direct_);
}

bool StoreFile::is_shorter() const {
  struct stat about;
  return fstat(plain_, &about) != 0 || about.st_size < file_bytes_;
}

std::string StoreFile::open(const std::string& path, bool direct) {
  plain_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (plain_ < 0) return problem("cannot be opened", errno);
  struct stat about;
  if (fstat(plain_, &about) != 0) return problem("no size", errno);
  file_bytes_ = about.st_size;
  unsigned char length[8];
  if (file_bytes_ < 8) return std::to_string(file_bytes_) + " bytes";
  int failed = read_fully(plain_, length, 8, 0);
  if (failed != 0) return problem("its header cannot be read", failed);
  const std::uint64_t header = u64(length);
  if (header > static_cast<std::uint64_t>(kMostHeader) || static_cast<std::int64_t>(header) > file_bytes_ - 8)
    return "a header of " + text(header) + " bytes in a file of " + std::to_string(file_bytes_);
  const std::int64_t start = 8 + static_cast<std::int64_t>(header);
  if (start % kStorePage != 0) return "data at byte " + std::to_string(start) + ", not on a page (not a store?)";
  unsigned char head[kHead];
  if (file_bytes_ - start < kHead) return "no superblock";
  failed = read_fully(plain_, head, kHead, start);
  if (failed != 0) return problem("its superblock cannot be read", failed);
  const std::uint64_t size = u64(head + 16);
  if (std::memcmp(head, kMagic, sizeof(kMagic)) != 0) return "no superblock where the data begins (not a store?)";
  if (size > static_cast<std::uint64_t>(kMostSuperblock) || static_cast<std::int64_t>(size) > file_bytes_ - start)
    return "a superblock of " + text(size) + " bytes";
  std::vector<unsigned char> superblock(static_cast<std::size_t>(size));
  failed = read_fully(plain_, superblock.data(), static_cast<std::int64_t>(size), start);
  if (failed != 0) return problem("its superblock cannot be read", failed);
  const std::string wrong =
      parse_superblock(superblock.data(), static_cast<std::int64_t>(size), start, file_bytes_, &layers_);
  if (!wrong.empty()) return wrong;
  for (const StoreLayer& layer : layers_) {
    std::vector<std::uint32_t> checks(static_cast<std::size_t>(layer.neurons + layer.gate_pages()));
    failed = read_fully(plain_, checks.data(), 4 * static_cast<std::int64_t>(checks.size()), layer.checks);
    if (failed != 0) return problem("its checksums cannot be read", failed);
    checks_.push_back(std::move(checks));
  }
#if defined(O_DIRECT)
  if (direct) {
    direct_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    bool pages = true;  // every slot consists of whole pages
    for (const StoreLayer& layer : layers_) pages = pages && layer.slot_bytes % kStorePage == 0;
    if (direct_ >= 0 && direct_works(superblock.data(), start, kDirectUnit)) {
      unit_ = kDirectUnit;
    } else if (direct_ >= 0 && pages && direct_works(superblock.data(), start, kStorePage)) {
      unit_ = kStorePage;
    } else if (direct_ >= 0) {
      close(direct_);
      direct_ = -1;
    }
  }
#else
  (void)direct;
#endif
  return "";
}

}  // namespace pi2
