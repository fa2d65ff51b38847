// Functions that are compiled once for each instruction set.
#pragma once

// The compiler makes a loop for each instruction set, and the loader chooses.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define PI2_FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PI2_FOR_EACH_CPU
#endif
