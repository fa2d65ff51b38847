#include "requests.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace pi2::runner {
namespace {

// Lines of a file, or of standard input.
class Lines {
 public:
  explicit Lines(const std::string& file) : fd_(file == "-" ? STDIN_FILENO : open(file.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd_ < 0) fail(file);
  }
  ~Lines() {
    if (fd_ != STDIN_FILENO) close(fd_);
  }
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;

  // The next one without its end; false: there is none, or a signal came. Throws Problem: it cannot be read.
  bool next(std::string& line) {
    std::size_t end;
    while ((end = read_.find('\n')) == std::string::npos) {
      pollfd input{fd_, POLLIN, 0};  // which no signal lets go on, as it does what reads
      if (poll(&input, 1, -1) < 0) return false;
      char piece[4096];
      const ssize_t bytes = read(fd_, piece, sizeof piece);
      if (bytes < 0) fail("requests");
      if (bytes == 0) {
        if (read_.empty()) return false;
        read_ += '\n';
      }
      read_.append(piece, static_cast<std::size_t>(bytes));
    }
    line = read_.substr(0, end > 0 && read_[end - 1] == '\r' ? end - 1 : end);
    read_.erase(0, end + 1);
    return true;
  }

 private:
  [[noreturn]] static void fail(const std::string& what) {
    throw Problem(what, "lines that can be read", std::strerror(errno), "Name a file, or - for standard input.");
  }

  int fd_;
  std::string read_;  // and not given yet
};

std::string line_of(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"; }

// Everything that can go wrong with one answer: the others are answered.
template <class Body>
std::string problem_of(const Body& body) {
  try {
    body();
    return "";
  } catch (const Problem& problem) {
    return problem.what();
  }
}

}  // namespace

void answer_requests(Session& session, const Options& o, const Print& print) {
  Lines lines(o.requests);
  for (std::string line; interrupted() == 0 && lines.next(line);) {
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    Json id;
    Json said;
    const std::string wrong = problem_of([&] {
      const Json json = parse_json(line, "request", kCorrectRequest);
      if (json.is_object()) id = json.value("id", Json());
      const Options asked = request_of(json, o);
      const auto stream = [&](int sequence, const std::string& text) {
        print(line_of({{"id", id}, {"sequence", sequence}, {"text", text}}));
      };
      const bool streams = json.value("stream", Json(false)) == Json(true);
      said = report(session.generate(asked, streams ? Stream(stream) : Stream()));
    });
    if (!wrong.empty()) said = {{"error", wrong}};
    said["id"] = id;
    print(line_of(said));
  }
}

void talk(Session& session, const Options& o, Interruptible& signals, const Print& print) {
  Lines lines("-");
  Options turn = o;
  turn.goes_on = true;
  if (!o.system.empty() || o.empty_system) turn.messages.push_back({"system", o.system});
  const bool shows = isatty(STDIN_FILENO) == 1;
  while (true) {
    if (shows) print("> ");
    std::string line;
    if (!lines.next(line)) return;
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    turn.messages.push_back({"user", line});
    std::string answer;
    const std::string wrong = problem_of([&] {
      const Run run = session.generate(turn, [&](int, const std::string& text) { print(text); });
      answer = run.generated.answers[0].text;
      print("\n");
      std::fprintf(stderr, "%s\n", summary(run).c_str());
    });
    if (interrupted() == SIGINT) {
      forget_interrupt();
      signals.listen();
    }
    if (interrupted() != 0) return;
    if (wrong.empty()) {
      turn.messages.push_back({"assistant", answer});
    } else {
      std::fprintf(stderr, "pi2_runner: %s\n", wrong.c_str());
      turn.messages.pop_back();
    }
  }
}

}  // namespace pi2::runner
