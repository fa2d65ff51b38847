// replay FOLDER: every file of it as an input of a fuzzer, without libFuzzer and so with any compiler. Ends with what
// the fuzzer ends with.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  long inputs = 0;
  std::error_code none;
  for (const auto& file : std::filesystem::directory_iterator(argc == 2 ? argv[1] : "", none)) {
    std::fprintf(stderr, "%s\n", file.path().filename().c_str());  // the last one is at fault
    std::ifstream in(file.path(), std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
    // Exactly as long as it is: what reads behind its end is seen by a sanitizer.
    const std::vector<std::uint8_t> data(bytes.begin(), bytes.end());
    LLVMFuzzerTestOneInput(data.data(), data.size());
    ++inputs;
  }
  std::printf("%ld inputs\n", inputs);
  return inputs > 0 ? 0 : 1;
}
