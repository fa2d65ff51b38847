// Files that the runner writes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string_view>

namespace pi2::runner {

// Whole or not at all. Throws Problem.
void write_file(const std::filesystem::path& file, std::string_view bytes);

// Float32 [steps, sequences, vocab] as NumPy reads it; steps are added one by one, the file appears when it is closed.
class LogitsFile {
 public:
  LogitsFile(const std::filesystem::path& file, std::int64_t sequences, std::int64_t vocab);
  ~LogitsFile();  // nothing is left of it unless it was closed
  LogitsFile(const LogitsFile&) = delete;
  LogitsFile& operator=(const LogitsFile&) = delete;
  void add(const float* logits);  // of one sequence, in their order
  void close();                   // Throws Problem: the disk is full, for instance

 private:
  std::string header() const;

  std::filesystem::path file_, partial_;
  std::ofstream stream_;
  std::int64_t sequences_, vocab_, rows_ = 0;
};

}  // namespace pi2::runner
