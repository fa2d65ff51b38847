// Several prompts, one after another: requests of a file, and talks.
#pragma once

#include <functional>
#include <string>

#include "interrupts.h"
#include "request_line.h"
#include "session.h"

namespace pi2::runner {

using Print = std::function<void(const std::string&)>;

// Of a file, or of standard input. A line has 16 MiB at most.
class Lines {
 public:
  explicit Lines(const std::string& file);  // Throws Problem: it cannot be read.
  ~Lines();
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;

  // The next one without its end; false: there is none, or a signal came. Throws Problem: it cannot be read.
  bool next(std::string& line);

 private:
  static constexpr std::size_t kMostBytes = 16 << 20;
  [[noreturn]] static void fail(const std::string& what);

  int fd_;
  std::string read_;          // and not given yet
  std::size_t searched_ = 0;  // of it, for the end of a line
};

// Answers every line with a line: the report of the answer, or what is wrong with the request, and its id. Ends with
// the last one, or after the answer that a signal ended. Throws Problem: lines cannot be read, or nobody reads the
// answers.
void answer_requests(Session& session, const Options& o, Lines& lines, const Print& print);

// Answers every line, to which all before belong as far as there is room. Ctrl-C ends an answer; where nothing is
// answered it ends the talk, as the end of the input does. What goes wrong with a line is said, and the talk goes on
// without it. Throws as answer_requests.
void talk(Session& session, const Options& o, Lines& lines, Interruptible& signals, const Print& print);

}  // namespace pi2::runner
