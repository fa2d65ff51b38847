#include "memory.h"

#include <fstream>
#include <string>
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace pi2::runner {

Memory memory_of_process() {
  Memory memory;
  std::ifstream status("/proc/self/status");
  for (std::string name; status >> name;) {
    std::int64_t kib = 0;
    if (name == "VmRSS:" && status >> kib) memory.resident = kib * 1024;
    if (name == "VmHWM:" && status >> kib) memory.peak = kib * 1024;
    if (name == "RssAnon:" && status >> kib) memory.anonymous = kib * 1024;
    status.ignore(4096, '\n');
  }
  return memory;
}

void share_heap() {
#ifdef __GLIBC__
  mallopt(M_ARENA_MAX, 2);
#endif
}

void trim_heap() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace pi2::runner
