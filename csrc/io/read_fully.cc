#include "io/read_fully.h"

#include <unistd.h>

#include <cerrno>

namespace pi2 {

int read_fully(int descriptor, void* into, std::int64_t bytes, std::int64_t offset) {
  auto* to = static_cast<char*>(into);
  while (bytes > 0) {
    const ssize_t got = pread(descriptor, to, static_cast<std::size_t>(bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return EIO;  // the file has shrunk
    to += got;
    offset += got;
    bytes -= got;
  }
  return 0;
}

int read_fully(int descriptor, const Read& read) {
  if (read.n_parts == 0) return read_fully(descriptor, read.into, read.bytes, read.offset);
  ssize_t got;
  do {
    got = preadv(descriptor, read.parts, static_cast<int>(read.n_parts), read.offset);
  } while (got < 0 && errno == EINTR);
  if (got == read.bytes) return 0;
  // A short read is repeated part by part.
  std::int64_t offset = read.offset;
  for (std::int64_t i = 0; i < read.n_parts; ++i) {
    const auto bytes = static_cast<std::int64_t>(read.parts[i].iov_len);
    const int error = read_fully(descriptor, read.parts[i].iov_base, bytes, offset);
    if (error != 0) return error;
    offset += bytes;
  }
  return 0;
}

}  // namespace pi2
