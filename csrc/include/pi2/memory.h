// Advice to the operating system about weights in memory.
#pragma once

#include <cstdint>

namespace pi2 {

// Asks for huge pages under [data, data + bytes): gathered reads gain about a quarter (fewer TLB misses). Must be
// called before the memory is first written. Returns whether the system took the advice; never an error.
bool advise_huge_pages(void* data, std::int64_t bytes);

}  // namespace pi2
