// Anonymous memory that is only committed when it is written.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#include "pi2/memory.h"

namespace pi2 {

class Arena {
 public:
  Arena() = default;
  ~Arena() {
    if (data_ != nullptr) munmap(data_, static_cast<std::size_t>(bytes_));
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  bool allocate(std::int64_t bytes, bool huge) {
    if (bytes == 0) return true;
    void* at =
        mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return false;
    data_ = static_cast<char*>(at);
    bytes_ = bytes;
    if (huge) advise_huge_pages(data_, bytes);
    // If a child were forked during direct reads, copy-on-write could make them land in the wrong pages.
    madvise(at, static_cast<std::size_t>(bytes), MADV_DONTFORK);
    return true;
  }

  // Returns whole pages within these offsets to the system; they are zeros when next touched.
  void give_back(std::int64_t from, std::int64_t to) {
    const auto page = static_cast<std::int64_t>(sysconf(_SC_PAGESIZE));
    from = (from + page - 1) / page * page;
    to = to / page * page;
    if (from < to) madvise(data_ + from, static_cast<std::size_t>(to - from), MADV_DONTNEED);
  }

  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace pi2
