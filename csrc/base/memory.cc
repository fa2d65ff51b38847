#include "pi2/memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace pi2 {

bool advise_huge_pages(void* data, std::int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kPage = 4096;
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(bytes)) / kPage * kPage;
  return end > begin && madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
#else
  (void)data;
  (void)bytes;
  return false;
#endif
}

std::int64_t give_back(void* data, std::int64_t bytes) {
#if defined(__linux__) && defined(MADV_FREE)
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(bytes)) / page * page;
  if (end <= begin) return 0;
  // The first fails for anything but private anonymous memory; the second frees the pages at once.
  void* const at = reinterpret_cast<void*>(begin);
  const bool done = madvise(at, end - begin, MADV_FREE) == 0 && madvise(at, end - begin, MADV_DONTNEED) == 0;
  return done ? static_cast<std::int64_t>(end - begin) : 0;
#else
  (void)data;
  (void)bytes;
  return 0;
#endif
}

}  // namespace pi2
