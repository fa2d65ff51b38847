// Memory that ends where an inaccessible page begins: one byte read or written too far is a crash, with or without a
// sanitizer, also where there is none (emulators).
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace pi2_test {

class Guarded {
 public:
  explicit Guarded(std::int64_t bytes) : bytes_(bytes) {
    const std::int64_t page = sysconf(_SC_PAGESIZE);
    mapped_ = (bytes + page - 1) / page * page + page;
    base_ = static_cast<char*>(
        mmap(nullptr, static_cast<std::size_t>(mapped_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + mapped_ - page, static_cast<std::size_t>(page), PROT_NONE) != 0) {
      std::perror("guarded memory");
      std::abort();
    }
    data_ = base_ + mapped_ - page - bytes;
  }
  Guarded(const void* from, std::int64_t bytes) : Guarded(bytes) {
    std::memcpy(data_, from, static_cast<std::size_t>(bytes));
  }
  Guarded(Guarded&& other) noexcept
      : base_(other.base_), data_(other.data_), bytes_(other.bytes_), mapped_(other.mapped_) {
    other.base_ = nullptr;
  }
  Guarded& operator=(Guarded&&) = delete;
  ~Guarded() {
    if (base_ != nullptr) munmap(base_, static_cast<std::size_t>(mapped_));
  }

  char* data() const { return data_; }
  std::int64_t size() const { return bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  char* base_;
  char* data_;
  std::int64_t bytes_, mapped_;
};

}  // namespace pi2_test
