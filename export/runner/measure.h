// The same prompt several times, for figures.
#pragma once

#include <string>

#include "session.h"

namespace pi2::runner {

// Of the rounds that were measured before a signal came: tokens per second as median, percentiles and extremes, and
// what the system says of temperatures and battery before and after. Throws Problem, also if there was none.
Json measure(Session& session, const Options& o);
std::string measured_text(const Json& found);  // for people, lines

}  // namespace pi2::runner
