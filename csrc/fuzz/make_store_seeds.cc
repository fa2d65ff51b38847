// Inputs from which fuzz_store begins: sound superblocks of all versions, as each kind of input. Takes a folder.
#include <cstdio>
#include <string>

#include "fuzz/input.h"

namespace {

using namespace pi2_fuzz;

// Of `layers` layers of 100 neurons of 64 numbers in int4, or 32 in bfloat16, or from version 3 on of 32 in q5_0 and
// down in int8, in version 4 of chunks of 64, whose slots lie one layer after the other, then checksums; in version 5
// gates behind those.
std::vector<std::uint8_t> superblock(std::uint32_t version, bool floats, int layers, std::int64_t file_bytes) {
  std::vector<std::uint8_t> out(128 + 128 * static_cast<std::size_t>(layers));
  put(&out, 8, version, 4);
  put(&out, 32, static_cast<std::uint64_t>(layers), 4);
  put(&out, 36, pi2::kStorePage, 4);
  for (int l = 0; l < layers; ++l) {
    const std::uint32_t cluster = version == 1 ? 0 : 2, slots = version == 1 ? 100 : 50;
    const std::size_t at = 128 + 128 * static_cast<std::size_t>(l);
    const std::uint64_t begins = 8192 + 53248 * static_cast<std::uint64_t>(l);
    put(&out, at, begins, 8);
    put(&out, at + 8, begins + slots * 512, 8);
    const std::uint32_t hidden = floats ? 32 : 64, dtype = floats ? 1 : 4, row_bytes = floats ? 64 : 36;
    const std::uint32_t numbers[] = {100, hidden, 3, dtype, 512, row_bytes, 10, static_cast<std::uint32_t>(l), cluster};
    for (std::size_t k = 0; k < std::size(numbers); ++k) put(&out, at + 16 + 4 * k, numbers[k], 4);
    if (version < 3) continue;
    const std::uint32_t pair[] = {32, 3, 7, 512, 22}, down[] = {5, 34};
    for (std::size_t k = 0; k < std::size(pair); ++k) put(&out, at + 20 + 4 * k, pair[k], 4);
    for (std::size_t k = 0; k < std::size(down); ++k) put(&out, at + 52 + 4 * k, down[k], 4);
    if (version == 4) put(&out, at + 60, 64, 4);
    if (version == 5) put(&out, at + 64, begins + 28672, 8);
  }
  seal(&out, file_bytes);
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  for (int seed = 0; seed < 44; ++seed) {
    const auto how = static_cast<std::uint8_t>(seed % 4);
    const std::int64_t file_bytes = 1000000;
    std::vector<std::uint8_t> bytes = superblock(seed >= 40      ? 5
                                                 : seed >= 36    ? 4
                                                 : seed >= 32    ? 3
                                                 : seed % 16 < 8 ? 1
                                                                 : 2,
                                                 seed >= 16, seed % 8 < 4 ? 1 : 3, file_bytes),
                              input(kPrefix);
    std::vector<pi2::StoreLayer> layers;
    const std::string wrong = pi2::parse_superblock(bytes.data(), static_cast<std::int64_t>(bytes.size()),
                                                    pi2::kStorePage, file_bytes, &layers);
    if (!wrong.empty()) {  // what is refused is no beginning
      std::fprintf(stderr, "%s\n", wrong.c_str());
      return 1;
    }
    if (how == kFile) {  // a whole one
      std::vector<std::uint8_t> header(static_cast<std::size_t>(pi2::kStorePage), ' ');
      put(&header, 0, header.size() - 8, 8);
      bytes.insert(bytes.begin(), header.begin(), header.end());
    }
    input[0] = how;
    put(&input, 1, pi2::kStorePage, 8);
    put(&input, 9, file_bytes, 8);
    input.insert(input.end(), bytes.begin(), bytes.end());
    const std::string path = std::string(argv[1]) + "/sound-" + std::to_string(seed);
    std::FILE* out = std::fopen(path.c_str(), "wb");
    if (out == nullptr || std::fwrite(input.data(), 1, input.size(), out) != input.size() || std::fclose(out) != 0)
      return 1;
  }
  return 0;
}
