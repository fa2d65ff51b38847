#include "io/output_file.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace pi2 {
namespace {

constexpr int kLinks = 40;  // as Linux follows
constexpr std::chrono::seconds kPatience{10};

// The target of the symbolic links at `path`, which need not exist. Returns "" and sets errno on failure.
std::string without_links(std::string path) {
  for (int links = 0; links < kLinks; ++links) {
    char to[PATH_MAX];
    const ssize_t bytes = readlink(path.c_str(), to, sizeof(to));
    if (bytes < 0) return path;  // not a link, or missing
    const std::string next(to, static_cast<std::size_t>(bytes));
    const std::size_t slash = path.rfind('/');
    path = next[0] == '/' || slash == std::string::npos ? next : path.substr(0, slash + 1) + next;
  }
  errno = ELOOP;
  return "";
}

bool same_file(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

// Returns 0 or errno.
int write_fully(int descriptor, const void* data, std::int64_t bytes, std::int64_t at) {
  const auto* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const auto count = static_cast<std::size_t>(bytes);
    const ssize_t done = at < 0 ? ::write(descriptor, p, count) : ::pwrite(descriptor, p, count, at);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return done == 0 ? EIO : errno;
    p += done;
    bytes -= done;
    if (at >= 0) at += done;
  }
  return 0;
}

bool is_standard_output(const std::string& path) {
  struct stat there, out;
  return path == "-" || (stat(path.c_str(), &there) == 0 && fstat(STDOUT_FILENO, &out) == 0 && same_file(there, out));
}

// A file name beside `target`, the same as in torch_pi2/base/files.py: writers in Python respect and remove it, too.
std::string beside(const std::string& target, const char* end) {
  const std::size_t name = target.rfind('/') + 1;
  return target.substr(0, name) + "." + target.substr(name) + end;
}

// A locked descriptor of `path`; else -1 and errno, EWOULDBLOCK if another process holds the lock.
int locked(const std::string& path) {
  for (;;) {
    const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (file < 0) return -1;
    struct stat mine, there;
    int error = flock(file, LOCK_EX | LOCK_NB) != 0 || fstat(file, &mine) != 0 ? errno : 0;
    if (error == 0 && stat(path.c_str(), &there) != 0) error = errno;
    if (error == 0 && same_file(mine, there)) return file;
    ::close(file);
    if (error == 0 || error == ENOENT || error == EINTR) continue;  // the lock file was removed in between
    errno = error;
    return -1;
  }
}

std::string text(int error) { return error == 0 ? "" : std::strerror(error); }

}  // namespace

std::string output_place(const std::string& path) {
  if (is_standard_output(path)) return "-";
  const std::string target = without_links(path);
  const std::size_t name = target.rfind('/') + 1;
  char folder[PATH_MAX];
  if (realpath(name == 0 ? "." : target.substr(0, name).c_str(), folder) == nullptr) return target;
  return std::string(folder) + "/" + target.substr(name);
}

OutputFile::~OutputFile() {
  if (owned_) ::close(descriptor_);
  if (!partial_.empty()) unlink(partial_.c_str());
  unlock();
}

std::string OutputFile::lock() {
  const std::string path = beside(target_, ".lock");
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while ((lock_ = locked(path)) < 0) {
    if (errno != EWOULDBLOCK) return text(errno);
    if (std::chrono::steady_clock::now() >= until) return "another process that writes it and has locked " + path;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return "";
}

void OutputFile::unlock() {
  if (lock_ < 0) return;
  unlink(beside(target_, ".lock").c_str());
  ::close(lock_);
  lock_ = -1;
}

std::string OutputFile::open(const std::string& path) {
  struct stat there;
  const bool exists = path != "-" && stat(path.c_str(), &there) == 0;
  if (path != "-" && !exists && errno != ENOENT) return text(errno);
  // Also if it is named (/dev/stdout, or the file that the shell redirects to): replacing it would lose printed output.
  if (is_standard_output(path)) {
    std::fflush(stdout);
    descriptor_ = STDOUT_FILENO;
    return "";
  }
  if (exists && S_ISDIR(there.st_mode)) return text(EISDIR);
  if (exists && !S_ISREG(there.st_mode)) {
    descriptor_ = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    owned_ = descriptor_ >= 0;
    return owned_ ? "" : text(errno);
  }
  target_ = without_links(path);
  if (target_.empty()) return text(errno);
  if (std::string wrong = lock(); !wrong.empty()) return wrong;
  std::string partial = beside(target_, ".partial");
  unlink(partial.c_str());  // left by a process that died, since nobody else has the lock
  descriptor_ = ::open(partial.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (descriptor_ < 0) return text(errno);
  owned_ = true;
  partial_ = std::move(partial);
  if (exists && fchmod(descriptor_, there.st_mode & 07777) != 0) return text(errno);
  return "";
}

std::string OutputFile::write(const void* data, std::int64_t bytes) {
  return text(write_fully(descriptor_, data, bytes, -1));
}

std::string OutputFile::write_first(const void* data, std::int64_t bytes) {
  return text(seekable() ? write_fully(descriptor_, data, bytes, 0) : ESPIPE);
}

std::string OutputFile::close() {
  int error = 0;
  if (!partial_.empty() && fsync(descriptor_) != 0) error = errno;
  if (owned_ && ::close(descriptor_) != 0 && error == 0) error = errno;
  owned_ = false;
  descriptor_ = -1;
  if (partial_.empty()) return text(error);
  if (error == 0 && std::rename(partial_.c_str(), target_.c_str()) != 0) error = errno;
  if (error != 0) unlink(partial_.c_str());
  partial_.clear();
  unlock();
  return text(error);
}

}  // namespace pi2
