// Writes traces of the core (pi2/trace.h) as Chrome trace events, like torch_pi2.trace.
#pragma once

#include <string>

#include "bindings/executorch/fault.h"

namespace pi2::et {

// Starts recording; fails if the file cannot be written.
Problem begin_trace(const std::string& path);
// Ends recording and writes the file, completely or not at all.
Problem write_trace(const std::string& path);

}  // namespace pi2::et
