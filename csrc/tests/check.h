// The smallest test harness that reports where and what: no framework to install.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace pi2_test {

inline int& failures() {
  static int count = 0;
  return count;
}

// Call at the end of main.
inline int finish(const char* name, long cases) {
  std::printf("%s: %ld cases, %d failed\n", name, cases, failures());
  return failures() == 0 && cases > 0 ? 0 : 1;
}

// The thread sanitizer takes a hundred times as long, so that what one thread computes is checked without it, or for
// the best set of instructions alone.
#ifdef __SANITIZE_THREAD__
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

// The first of `count` sets of instructions, the best one last, that a test goes through.
constexpr int first_of(int count) { return kThreadSanitizer ? count - 1 : 0; }

}  // namespace pi2_test

#define PI2_CHECK(condition, ...)                                 \
  do {                                                            \
    if (!(condition)) {                                           \
      ++pi2_test::failures();                                     \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                   \
      std::printf("\n");                                          \
    }                                                             \
  } while (0)
