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
