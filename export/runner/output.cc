#include "output.h"

#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <vector>

#include "problem.h"

namespace pi2::runner {
namespace {

constexpr std::size_t kHeader = 128;  // of an .npy file; fits any number of steps

void check_written(const std::string& file, const std::string& wrong) {
  if (wrong.empty()) return;
  throw Problem(file == "-" ? "standard output" : file, "a file that can be written", wrong,
                "Check the folder, the room on its disk, and who reads it.");
}

}  // namespace

void write_file(const std::string& file, std::string_view bytes) {
  OutputFile out;
  check_written(file, out.open(file));
  check_written(file, out.write(bytes.data(), std::ssize(bytes)));
  check_written(file, out.close());
}

void print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    try {
      check_written("-", std::strerror(errno));
    } catch (const Problem& problem) {
      throw OutputClosed(problem.what());
    }
  }
}

static_assert(std::endian::native == std::endian::little);

LogitsFile::LogitsFile(const std::string& file, std::int64_t sequences, std::int64_t vocab)
    : file_(file), sequences_(sequences), vocab_(vocab) {
  check(out_.open(file_));
  if (out_.seekable()) {
    check(out_.write(header().data(), kHeader));
  } else {
    aside_.reset(std::tmpfile());
    if (aside_ == nullptr) check(std::string("no temporary file: ") + std::strerror(errno));
  }
}

void LogitsFile::check(const std::string& wrong) const { check_written(file_, wrong); }

std::string LogitsFile::header() const {
  std::string text("\x93NUMPY\x01\x00\x76\x00", 10);
  text += "{'descr': '<f4', 'fortran_order': False, 'shape': (" + std::to_string(rows_ / sequences_) + ", " +
          std::to_string(sequences_) + ", " + std::to_string(vocab_) + "), }";
  text.resize(kHeader - 1, ' ');
  return text + '\n';
}

void LogitsFile::add(const float* logits) {
  ++rows_;
  if (aside_ == nullptr) return check(out_.write(logits, vocab_ * static_cast<std::int64_t>(sizeof(float))));
  const auto count = static_cast<std::size_t>(vocab_);
  if (std::fwrite(logits, sizeof(float), count, aside_.get()) != count) check(std::strerror(errno));
}

void LogitsFile::close() {
  if (aside_ == nullptr) {
    check(out_.write_first(header().data(), kHeader));
  } else {
    check(out_.write(header().data(), kHeader));
    std::vector<char> piece(1 << 20);
    std::rewind(aside_.get());
    while (const std::size_t bytes = std::fread(piece.data(), 1, piece.size(), aside_.get())) {
      check(out_.write(piece.data(), static_cast<std::int64_t>(bytes)));
    }
    if (std::ferror(aside_.get()) != 0) check(std::strerror(errno));
  }
  check(out_.close());
}

}  // namespace pi2::runner
