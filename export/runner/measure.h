// Measures repeated runs of the same prompt.
#pragma once

#include <string>

#include "session.h"

namespace pi2::runner {

// Returns, for the rounds completed before a signal, tokens per second (median, percentiles, extremes), and
// temperatures and battery before and after. Throws Problem, also if no round was completed.
Json measure(Session& session, const Options& o);
std::string measured_text(const Json& found);  // lines of text

}  // namespace pi2::runner
