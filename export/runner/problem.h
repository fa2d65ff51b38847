// Errors for the user: one line with what was expected, what was found and what to do.
#pragma once

#include <stdexcept>
#include <string>

namespace pi2::runner {

// Bytes of a file as part of one line: without terminal control characters, at most `most` bytes.
std::string printable(const std::string& text, std::size_t most);

class Problem : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;  // a complete line
  Problem(const std::string& what, const std::string& expected, const std::string& found, const std::string& fix)
      : std::runtime_error(printable(what, 4096) + ": expected " + expected + ", found " + printable(found, 160) +
                           ". " + fix) {}
};

// The request does not fit; a smaller one may.
class NoRoom : public Problem {
 public:
  using Problem::Problem;
};

// An error during computation; the request is not at fault.
class RunError : public Problem {
 public:
  using Problem::Problem;
};

// Output cannot be written: its reader is gone.
class OutputClosed : public Problem {
 public:
  using Problem::Problem;
};

}  // namespace pi2::runner
