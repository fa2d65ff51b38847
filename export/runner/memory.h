// Memory of this process.
#pragma once

#include <cstdint>

namespace pi2::runner {

struct Memory {
  std::int64_t resident = 0, peak = 0;  // bytes, with pages of mapped files
  std::int64_t anonymous = 0;           // of them what no file backs
};

// As Linux says in /proc; zeros where that cannot be read.
Memory memory_of_process();

// From now on threads share a heap: with one each, as many of them keep what they have freed.
void share_heap();

// Gives back what was freed since the start: a tokenizer's file in pieces takes much more than what is kept of it.
void trim_heap();

}  // namespace pi2::runner
