// A file to be written: whole or not at all where that is possible.
#pragma once

#include <cstdint>
#include <string>

namespace pi2 {

// Where OutputFile would write what is given this path: links are followed, also to what is not there yet. "-" is
// standard output, by whatever name. "": links that lead nowhere.
std::string output_place(const std::string& path);

// A regular file appears, or takes the place of one (keeping its permissions), when all of it is there; a link stays,
// and the file that it leads to is replaced. What is no regular file (a device, a FIFO, standard output) is written to
// directly, in order. Not for two threads at a time.
//
// One process at a time writes a regular file: others wait up to 10 s, then say so. What it writes is .NAME.partial
// until it is whole, and .NAME.lock is locked meanwhile; what a process leaves that is killed the next one removes.
class OutputFile {
 public:
  OutputFile() = default;
  ~OutputFile();  // nothing is left of a file that was not closed
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  // `path`: "-" is standard output. Each returns what is wrong, or "".
  std::string open(const std::string& path);
  std::string write(const void* data, std::int64_t bytes);
  // At the beginning, over what was written there before; of what is seekable only.
  std::string write_first(const void* data, std::int64_t bytes);
  std::string close();

  // Whether write_first works.
  bool seekable() const { return !partial_.empty(); }

 private:
  std::string lock();
  void unlock();

  int descriptor_ = -1, lock_ = -1;
  bool owned_ = false;            // standard output is not
  std::string target_, partial_;  // of a regular file: its place, and where it is until it is whole
};

}  // namespace pi2
