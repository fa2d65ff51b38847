// Writes a file completely or not at all, where that is possible.
#pragma once

#include <cstdint>
#include <string>

namespace pi2 {

// Where OutputFile would write: follows links, also to a missing file. "-": standard output, by whatever name. "": the
// links lead nowhere.
std::string output_place(const std::string& path);

// A regular file appears, or replaces another (keeping its permissions), when it is complete. A link stays, and its
// target is replaced. Anything else (a device, a FIFO, standard output) is written directly, in order. Not thread-safe.
//
// One process at a time writes a regular file; others wait up to 10 s and then fail. The file is .NAME.partial until it
// is complete, and .NAME.lock is locked meanwhile. What a killed process leaves is removed by the next one.
class OutputFile {
 public:
  OutputFile() = default;
  ~OutputFile();  // removes a file that was not closed
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  // `path`: "-" is standard output. Each function returns "" or an error message.
  std::string open(const std::string& path);
  std::string write(const void* data, std::int64_t bytes);
  // Overwrites the beginning; only if seekable.
  std::string write_first(const void* data, std::int64_t bytes);
  std::string close();

  // Whether write_first works.
  bool seekable() const { return !partial_.empty(); }

 private:
  std::string lock();
  void unlock();

  int descriptor_ = -1, lock_ = -1;
  bool owned_ = false;            // false: standard output
  std::string target_, partial_;  // paths of a regular file: final, and until it is complete
};

}  // namespace pi2
