// Complete reads, or an error.
#pragma once

#include <cstdint>

#include "pi2/read_engine.h"

namespace pi2 {

// Reads all bytes or returns an errno (EIO at the end of the file): no short reads, no EINTR.
int read_fully(int descriptor, void* into, std::int64_t bytes, std::int64_t offset);
int read_fully(int descriptor, const Read& read);

}  // namespace pi2
