// Work handed out one index at a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "pi2/types.h"

namespace pi2 {

// Hands out the indices [0, n) one by one, so that full and nearly empty chunks balance. Results do not depend on which
// thread takes which index.
struct Dynamic {
  std::atomic<std::int64_t> next{0};
  std::int64_t n;
  void (*body)(void* context, std::int64_t index);
  void* context;

  static void run(const ParallelFor& parallel, std::int64_t n, void (*body)(void*, std::int64_t), void* context) {
    Dynamic work;
    work.n = n;
    work.body = body;
    work.context = context;
    const std::int64_t workers = std::min<std::int64_t>(std::max(1, parallel.threads), n);
    parallel.run(
        parallel.host, workers,
        [](void* self, std::int64_t) {
          auto* w = static_cast<Dynamic*>(self);
          for (std::int64_t i = w->next.fetch_add(1); i < w->n; i = w->next.fetch_add(1)) w->body(w->context, i);
        },
        &work);
  }
};

}  // namespace pi2
