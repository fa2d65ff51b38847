// A line of --requests.
#pragma once

#include <string_view>

#include "fields.h"
#include "options.h"

namespace pi2::runner {

constexpr const char* kCorrectRequest = "Correct the request.";

// What somebody sends: of a bounded number of values, each of which takes memory that no budget has counted. Throws
// Problem.
Json parse_request(std::string_view text);

// One JSON object (docs/BUNDLE.md has its fields). What it does not say is as `o` has it. Throws Problem.
Options request_of(const Json& line, const Options& o);

}  // namespace pi2::runner
