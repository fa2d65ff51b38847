// Files that the runner writes; "-" is standard output (csrc/io/output_file.h describes others).
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "io/output_file.h"

namespace pi2::runner {

// Throws Problem.
void write_file(const std::string& file, std::string_view bytes);

// Prints to standard output, unbuffered. Throws Problem if its reader is gone or the disk is full.
void print(std::string_view text);

// Writes float32 [steps, sequences, vocab] as .npy, step by step.
class LogitsFile {
 public:
  LogitsFile(const std::string& file, std::int64_t sequences, std::int64_t vocab);  // Throws Problem.
  void add(const float* logits);                                                    // of one sequence, in order
  void close();  // throws Problem, for example if the disk is full; a file that is not closed is removed

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string header() const;
  void check(const std::string& wrong) const;

  std::string file_;
  OutputFile out_;
  std::unique_ptr<std::FILE, Close> aside_;  // temporary file: the number of steps comes first in the .npy file
  std::int64_t sequences_, vocab_, rows_ = 0;
};

}  // namespace pi2::runner
