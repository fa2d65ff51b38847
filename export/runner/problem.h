// What is wrong, for whoever started the program: one line that says what was expected, what was found and what to do.
#pragma once

#include <stdexcept>
#include <string>

namespace pi2::runner {

// Any bytes of a file as a part of one line: without what a terminal takes for commands, at most `most` bytes.
std::string printable(const std::string& text, std::size_t most);

class Problem : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;  // a line that somebody else has written
  Problem(const std::string& what, const std::string& expected, const std::string& found, const std::string& fix)
      : std::runtime_error(printable(what, 4096) + ": expected " + expected + ", found " + printable(found, 160) +
                           ". " + fix) {}
};

// What was asked for has no room: less may.
class NoRoom : public Problem {
 public:
  using Problem::Problem;
};

// What went wrong while it was computed: what was asked for is not at fault.
class Broken : public Problem {
 public:
  using Problem::Problem;
};

// What is printed cannot be written: whoever is answered does not hear it.
class NobodyReads : public Problem {
 public:
  using Problem::Problem;
};

}  // namespace pi2::runner
