// Files that the runner reads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace pi2::runner {

// A regular file, open; of what would block for ever (a FIFO) or has no end (a device) nothing is read.
class RegularFile {
 public:
  explicit RegularFile(const std::filesystem::path& file);  // Throws Problem.
  ~RegularFile();
  RegularFile(const RegularFile&) = delete;
  RegularFile& operator=(const RegularFile&) = delete;

  std::int64_t bytes() const { return bytes_; }  // when it was opened
  // All of it in order, in pieces. Throws Problem.
  void read(const std::function<void(std::string_view)>& take) const;

 private:
  std::filesystem::path file_;
  int descriptor_ = -1;
  std::int64_t bytes_ = 0;
};

// All of it. Throws Problem: it has more than `most` bytes, or is none that can be read.
std::string read_file(const std::filesystem::path& file, std::int64_t most);

}  // namespace pi2::runner
