// Names of the library's threads: pi2-compute, pi2-read, pi2-arrange. Tools show them, and programs that pin threads to
// CPUs can find them (the library pins none).
#pragma once

#include <thread>

#ifdef __linux__
#include <pthread.h>
#endif

namespace pi2 {

// At most 15 letters.
inline void name_thread([[maybe_unused]] std::thread& thread, [[maybe_unused]] const char* name) {
#ifdef __linux__
  pthread_setname_np(thread.native_handle(), name);
#endif
}

}  // namespace pi2
