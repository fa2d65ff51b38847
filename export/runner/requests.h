// Several prompts in sequence: requests from a file, and chats.
#pragma once

#include <functional>
#include <string>

#include "interrupts.h"
#include "request_line.h"
#include "session.h"

namespace pi2::runner {

using Print = std::function<void(const std::string&)>;

// Lines of a file or standard input, at most 16 MiB each.
class Lines {
 public:
  explicit Lines(const std::string& file);  // throws Problem if it cannot be read
  ~Lines();
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;

  // The next line without its end; false at the end or after a signal. Throws Problem if it cannot be read.
  bool next(std::string& line);

 private:
  static constexpr std::size_t kMostBytes = 16 << 20;
  [[noreturn]] static void fail(const std::string& what);

  int fd_;
  std::string read_;          // input that was not returned yet
  std::size_t searched_ = 0;  // bytes of it without a line end
};

// Answers every line with a line: the report, or the error of the request, and its id. Ends with the last line, or
// after the answer that a signal ended. Throws Problem if lines cannot be read or answers cannot be written.
void answer_requests(Session& session, const Options& o, Lines& lines, const Print& print);

// A chat: answers every line, with the lines before as context as far as they fit. Ctrl-C ends an answer; between
// answers it ends the chat, like the end of input. Errors of a line are printed, and the chat goes on without it.
// Throws as answer_requests.
void talk(Session& session, const Options& o, Lines& lines, Interruptible& signals, const Print& print);

}  // namespace pi2::runner
