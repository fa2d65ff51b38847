// What is wrong, for whoever started the program: one line that says what was expected, what was found and what to do.
#pragma once

#include <stdexcept>
#include <string>

namespace pi2::runner {

class Problem : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;  // a line that somebody else has written
  Problem(const std::string& what, const std::string& expected, const std::string& found, const std::string& fix)
      : std::runtime_error(what + ": expected " + expected + ", found " + found + ". " + fix) {}
};

}  // namespace pi2::runner
