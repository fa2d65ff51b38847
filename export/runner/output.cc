#include "output.h"

#include <bit>
#include <string>

#include "problem.h"

namespace pi2::runner {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kHeader = 128;  // of an .npy file, with room for any number of steps

fs::path partial_of(const fs::path& file) { return fs::path(file).concat(".part"); }

[[noreturn]] void refuse(const fs::path& file) {
  throw Problem(file.string(), "a file that can be written", "an error", "Check the folder and the room on its disk.");
}

void finish(std::ofstream& stream, const fs::path& partial, const fs::path& file) {
  stream.close();
  std::error_code error;
  if (stream) fs::rename(partial, file, error);
  if (!stream || error) {
    fs::remove(partial, error);
    refuse(file);
  }
}

}  // namespace

void write_file(const fs::path& file, std::string_view bytes) {
  const fs::path partial = partial_of(file);
  std::ofstream stream(partial, std::ios::binary | std::ios::trunc);
  stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  finish(stream, partial, file);
}

static_assert(std::endian::native == std::endian::little);

LogitsFile::LogitsFile(const fs::path& file, std::int64_t sequences, std::int64_t vocab)
    : file_(file),
      partial_(partial_of(file)),
      stream_(partial_, std::ios::binary | std::ios::trunc),
      sequences_(sequences),
      vocab_(vocab) {
  if (!stream_) refuse(file_);
  stream_ << header();
}

LogitsFile::~LogitsFile() {
  if (!stream_.is_open()) return;
  stream_.close();
  std::error_code error;
  fs::remove(partial_, error);
}

std::string LogitsFile::header() const {
  std::string text("\x93NUMPY\x01\x00\x76\x00", 10);
  text += "{'descr': '<f4', 'fortran_order': False, 'shape': (" + std::to_string(rows_ / sequences_) + ", " +
          std::to_string(sequences_) + ", " + std::to_string(vocab_) + "), }";
  text.resize(kHeader - 1, ' ');
  return text + '\n';
}

void LogitsFile::add(const float* logits) {
  stream_.write(reinterpret_cast<const char*>(logits), static_cast<std::streamsize>(vocab_ * sizeof(float)));
  ++rows_;
}

void LogitsFile::close() {
  stream_.seekp(0);
  stream_ << header();
  finish(stream_, partial_, file_);
}

}  // namespace pi2::runner
