// Memory of the process.
#pragma once

#include <cstdint>

namespace pi2::runner {

struct Memory {
  std::int64_t resident = 0, peak = 0;  // bytes, including pages of mapped files
  std::int64_t anonymous = 0;           // resident bytes without a file
};

// From /proc; zeros if it cannot be read.
Memory memory_of_process();

// Makes threads share one heap: separate heaps would each keep freed memory.
void share_heap();

// Returns freed memory to the system: parsing a tokenizer's file takes much more memory than the tokenizer.
void trim_heap();

}  // namespace pi2::runner
