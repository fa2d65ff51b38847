// ExecuTorch's threads as a ParallelFor.
#pragma once

#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include "pi2/types.h"

namespace pi2::et {

// Not inside a parallel_for: the pool is not re-entrant, and asking for its size would deadlock.
inline ParallelFor executorch_threads() {
  ParallelFor parallel;
  parallel.threads = static_cast<int>(executorch::extension::get_thread_count());
  parallel.run = [](void*, std::int64_t n, ParallelFor::Body body, void* context) {
    if (n == 1) return body(context, 0);
    const auto some = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) body(context, i);
    };
    // Only false for an invalid range.
    (void)executorch::extension::parallel_for(0, n, 1, some);
  };
  return parallel;
}

}  // namespace pi2::et
