// A small store in a file of its own, written byte by byte as docs/STORE.md says, and removed at the end.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "store/store_file.h"
#include "tests/check.h"
#include "tests/random.h"

namespace pi2_test {

inline void put(std::vector<char>* out, std::size_t at, std::uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) (*out)[at + i] = static_cast<char>(value >> (8 * i));
}

// The superblock's checksum, after whatever was changed in it.
inline void seal(std::vector<char>* superblock) {
  put(superblock, 12, 0, 4);
  put(superblock, 12, pi2::crc32c(superblock->data(), superblock->size()), 4);
}

struct StoreFixture {
  std::string path;
  std::vector<char> file, superblock;
  std::vector<pi2::StoreLayer> layers;
  std::vector<std::vector<char>> neuron_rows;  // [layers], without padding: as in memory

  static constexpr std::int64_t kStart = pi2::kStorePage;  // of the data; the header is spaces and two braces

  StoreFixture(std::mt19937& rng, int n_layers, std::int64_t neurons, std::int64_t rows, std::int64_t hidden,
               pi2::DType dtype, std::int64_t n_hot = 0, std::int64_t cluster = 1, const pi2::DType* down = nullptr,
               bool apart = false) {
    char name[] = "/tmp/pi2-store-XXXXXX";
    close(mkstemp(name));
    path = name;
    file.assign(static_cast<std::size_t>(kStart), ' ');
    put(&file, 0, kStart - 8, 8);
    std::memcpy(&file[8], "{}", 2);
    superblock.assign(static_cast<std::size_t>(pi2::kStorePage), 0);
    file.insert(file.end(), superblock.begin(), superblock.end());
    for (int l = 0; l < n_layers; ++l) {
      pi2::StoreLayer layer;
      layer.neurons = neurons;
      layer.hidden = hidden;
      layer.rows = rows;
      layer.w_dtype = dtype;
      layer.row_bytes = pi2::row_bytes(dtype, hidden);
      layer.other_down = down != nullptr;
      if (down != nullptr) layer.down_dtype = *down;
      layer.cluster = cluster;
      layer.gates = apart ? kStart : 0;  // its place is known later
      const auto gate_bytes = static_cast<std::size_t>(apart ? layer.row_bytes : 0);
      std::vector<char> gates;
      layer.slot_bytes = (cluster * layer.neuron_bytes() + 511) / 512 * 512;
      layer.n_hot = n_hot;
      layer.number = l;
      neuron_rows.emplace_back();
      std::vector<std::uint32_t> checks;
      pad();
      layer.slots = static_cast<std::int64_t>(file.size());
      for (std::int64_t i = 0; i < neurons; ++i) {
        std::vector<char> neuron;
        for (std::int64_t r = 0; r < rows; ++r) {
          const pi2::DType kind = down != nullptr && r + 1 == rows ? *down : dtype;
          const bool floats = !pi2::is_quantized(kind) && !pi2::is_ggml(kind);
          const std::vector<char> row = floats ? stored(rng, kind, hidden, 0.1f) : quantized_row(rng, kind, hidden);
          neuron.insert(neuron.end(), row.begin(), row.end());
        }
        neuron_rows.back().insert(neuron_rows.back().end(), neuron.begin(), neuron.end());
        gates.insert(gates.end(), neuron.begin(), neuron.begin() + static_cast<std::ptrdiff_t>(gate_bytes));
        checks.push_back(pi2::crc32c(neuron.data() + gate_bytes, neuron.size() - gate_bytes));
        file.insert(file.end(), neuron.begin() + static_cast<std::ptrdiff_t>(gate_bytes), neuron.end());
        const std::int64_t slots_before = i / cluster + 1;  // with that of this neuron
        if ((i + 1) % cluster == 0 || i + 1 == neurons)
          file.resize(static_cast<std::size_t>(layer.slots + slots_before * layer.slot_bytes));
      }
      if (apart) {
        pad();
        layer.gates = static_cast<std::int64_t>(file.size());
        file.insert(file.end(), gates.begin(), gates.end());
        pad();
        for (std::size_t at = 0; at < gates.size(); at += 4096)
          checks.push_back(pi2::crc32c(&gates[at], std::min<std::size_t>(4096, gates.size() - at)));
      }
      layer.checks = static_cast<std::int64_t>(file.size());
      const char* from = reinterpret_cast<const char*>(checks.data());
      file.insert(file.end(), from, from + 4 * checks.size());
      layers.push_back(layer);
    }
    pad();
    std::memcpy(superblock.data(), "PI2STORE", 8);
    put(&superblock, 8, apart ? 5 : down != nullptr ? 3 : cluster == 1 ? 1 : 2, 4);
    put(&superblock, 16, superblock.size(), 8);
    put(&superblock, 24, file.size(), 8);
    put(&superblock, 32, layers.size(), 4);
    put(&superblock, 36, 4096, 4);
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const pi2::StoreLayer& layer = layers[l];
      const std::size_t at = 128 + 128 * l;
      put(&superblock, at, static_cast<std::uint64_t>(layer.slots), 8);
      put(&superblock, at + 8, static_cast<std::uint64_t>(layer.checks), 8);
      const std::int64_t numbers[] = {layer.neurons,    layer.hidden,    layer.rows,  static_cast<int>(dtype),
                                      layer.slot_bytes, layer.row_bytes, layer.n_hot, layer.number};
      for (std::size_t k = 0; k < 8; ++k) put(&superblock, at + 16 + 4 * k, static_cast<std::uint64_t>(numbers[k]), 4);
      put(&superblock, at + 64, static_cast<std::uint64_t>(layer.gates), 8);
      if (cluster > 1 || down != nullptr || apart) put(&superblock, at + 48, static_cast<std::uint64_t>(cluster), 4);
      if (down == nullptr) continue;
      put(&superblock, at + 52, static_cast<std::uint64_t>(*down), 4);
      put(&superblock, at + 56, static_cast<std::uint64_t>(pi2::row_bytes(*down, hidden)), 4);
    }
    seal(&superblock);
    write();
  }

  ~StoreFixture() { unlink(path.c_str()); }

  void pad() { file.resize((file.size() + 4095) / 4096 * 4096); }

  // The file as `superblock` and `file` say it.
  void write() {
    std::memcpy(&file[static_cast<std::size_t>(kStart)], superblock.data(), superblock.size());
    std::FILE* out = std::fopen(path.c_str(), "wb");
    PI2_CHECK(out != nullptr && std::fwrite(file.data(), 1, file.size(), out) == file.size(), "%s", path.c_str());
    if (out != nullptr) std::fclose(out);
  }
};

}  // namespace pi2_test
