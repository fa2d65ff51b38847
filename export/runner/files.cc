#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "problem.h"

namespace pi2::runner {
namespace {

constexpr const char* kFix = "Copy the bundle again, or export it again with this version of torch_pi2.";
constexpr std::size_t kPiece = 1 << 20;

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

}  // namespace

RegularFile::RegularFile(const std::filesystem::path& file) : file_(file) {
  // O_NONBLOCK: opening a FIFO would wait for a writer.
  descriptor_ = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat about;
  if (descriptor_ < 0 || fstat(descriptor_, &about) != 0) {
    const std::string found = errno == ENOENT ? "no such file" : std::strerror(errno);
    if (descriptor_ >= 0) ::close(descriptor_);
    throw Problem(file_.string(), "a file that can be read", found, kFix);
  }
  if (!S_ISREG(about.st_mode)) {
    ::close(descriptor_);
    throw Problem(file_.string(), "a file", kind_of(about.st_mode), kFix);
  }
  bytes_ = about.st_size;
}

RegularFile::~RegularFile() { ::close(descriptor_); }

void RegularFile::read(const std::function<void(std::string_view)>& take) const {
  std::vector<char> piece(kPiece);
  for (std::int64_t at = 0;;) {
    const ssize_t count = ::pread(descriptor_, piece.data(), piece.size(), at);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw Problem(file_.string(), "a file that can be read", std::strerror(errno), kFix);
    if (count == 0) return;
    take({piece.data(), static_cast<std::size_t>(count)});
    at += count;
  }
}

std::string read_file(const std::filesystem::path& file, std::int64_t most) {
  const RegularFile open(file);
  const auto check = [&](std::int64_t bytes) {
    if (bytes <= most) return;
    throw Problem(file.string(), "at most " + std::to_string(most) + " bytes", std::to_string(bytes), kFix);
  };
  check(open.bytes());
  std::string all;
  all.reserve(static_cast<std::size_t>(open.bytes()));
  open.read([&](std::string_view piece) {
    check(static_cast<std::int64_t>(all.size() + piece.size()));  // the file may grow while it is read
    all += piece;
  });
  return all;
}

}  // namespace pi2::runner
