// Files that the runner writes; "-" is standard output (csrc/io/output_file.h says what becomes of others).
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

// To standard output, at once. Throws Problem: nobody reads it any more, or its disk is full.
void print(std::string_view text);

// Float32 [steps, sequences, vocab] as NumPy reads it; steps are added one by one.
class LogitsFile {
 public:
  LogitsFile(const std::string& file, std::int64_t sequences, std::int64_t vocab);  // Throws Problem.
  void add(const float* logits);                                                    // of one sequence, in their order
  void close();  // Throws Problem: the disk is full, for instance. Nothing is left of a file that was not closed.

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string header() const;
  void check(const std::string& wrong) const;

  std::string file_;
  OutputFile out_;
  std::unique_ptr<std::FILE, Close> aside_;  // where they wait for the number of steps, which comes first in the file
  std::int64_t sequences_, vocab_, rows_ = 0;
};

}  // namespace pi2::runner
