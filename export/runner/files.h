// Reading files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace pi2::runner {

// An open regular file. Refuses FIFOs, which could block for ever, and devices, which may have no end.
class RegularFile {
 public:
  explicit RegularFile(const std::filesystem::path& file);  // Throws Problem.
  ~RegularFile();
  RegularFile(const RegularFile&) = delete;
  RegularFile& operator=(const RegularFile&) = delete;

  std::int64_t bytes() const { return bytes_; }  // at opening
  // Reads the file in pieces, in order. Throws Problem.
  void read(const std::function<void(std::string_view)>& take) const;

 private:
  std::filesystem::path file_;
  int descriptor_ = -1;
  std::int64_t bytes_ = 0;
};

// Reads a whole file. Throws Problem if it has more than `most` bytes or cannot be read.
std::string read_file(const std::filesystem::path& file, std::int64_t most);

}  // namespace pi2::runner
