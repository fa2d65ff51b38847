// A line of --requests.
#pragma once

#include "options.h"

namespace pi2::runner {

constexpr const char* kCorrectRequest = "Correct the request.";

// One JSON object (docs/BUNDLE.md has its fields). What it does not say is as `o` has it. Throws Problem.
Options request_of(const Json& line, const Options& o);

}  // namespace pi2::runner
