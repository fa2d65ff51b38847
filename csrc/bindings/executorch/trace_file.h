// What the core recorded (pi2/trace.h) as Chrome trace events, as torch_pi2.trace writes them.
#pragma once

#include <string>

#include "bindings/executorch/fault.h"

namespace pi2::et {

// Begins to record for this file, which must be one that can be written.
Problem begin_trace(const std::string& path);
// Ends it and writes the file, whole or not at all.
Problem write_trace(const std::string& path);

}  // namespace pi2::et
