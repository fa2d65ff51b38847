// ExecuTorch's threads as the core takes them.
#pragma once

#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include "pi2/types.h"

namespace pi2::et {

// Not from inside a parallel_for: its pool is not re-entrant, and asking for its size there would wait for ever.
inline ParallelFor executorch_threads() {
  ParallelFor parallel;
  parallel.threads = static_cast<int>(executorch::extension::get_thread_count());
  parallel.run = [](void*, std::int64_t n, ParallelFor::Body body, void* context) {
    if (n == 1) return body(context, 0);
    const auto some = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) body(context, i);
    };
    // False for a range that makes no sense only, and then nothing was done.
    (void)executorch::extension::parallel_for(0, n, 1, some);
  };
  return parallel;
}

}  // namespace pi2::et
