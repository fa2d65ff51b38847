// Several prompts, one after another: requests of a file, and talks.
#pragma once

#include <functional>
#include <string>

#include "interrupts.h"
#include "request_line.h"
#include "session.h"

namespace pi2::runner {

using Print = std::function<void(const std::string&)>;

// Answers every line of o.requests with a line: the report of the answer, or what is wrong with the request, and its
// id. Ends with the file, or after the answer that a signal ended. Throws Problem: the file cannot be read.
void answer_requests(Session& session, const Options& o, const Print& print);

// Answers every line of standard input, to which all before belong. Ctrl-C ends an answer; where nothing is answered it
// ends the talk, as the end of the input does. What goes wrong with a line is said, and the talk goes on without it.
void talk(Session& session, const Options& o, Interruptible& signals, const Print& print);

}  // namespace pi2::runner
