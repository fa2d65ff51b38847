// A line of --requests.
#pragma once

#include <string_view>

#include "fields.h"
#include "options.h"

namespace pi2::runner {

constexpr const char* kCorrectRequest = "Correct the request.";

// Parses input from outside. Bounds the number of values, whose memory no budget counts. Throws Problem.
Json parse_request(std::string_view text);

// Parses one JSON object (fields: docs/BUNDLE.md); `o` has the defaults. Throws Problem.
Options request_of(const Json& line, const Options& o);

}  // namespace pi2::runner
