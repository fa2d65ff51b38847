#include "requests.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>

namespace pi2::runner {
namespace {

// Answers the last of `turn`'s messages. Drops the oldest messages if the chat no longer fits.
Run answered(Session& session, Options& turn, std::size_t first, const Stream& stream) {
  while (true) {
    try {
      return session.generate(turn, stream);
    } catch (const NoRoom&) {
      if (turn.messages.size() < first + 3) throw;
      const auto oldest = turn.messages.begin() + static_cast<std::ptrdiff_t>(first);
      turn.messages.erase(oldest, oldest + 2);
      std::fprintf(stderr, "(the oldest question and its answer are forgotten: no room)\n");
    }
  }
}

// Catches every error of one answer, so that the others are answered.
template <class Body>
std::string problem_of(const Body& body) {
  try {
    body();
    return "";
  } catch (const OutputClosed&) {
    throw;
  } catch (const Problem& problem) {
    return problem.what();
  }
}

}  // namespace

Lines::Lines(const std::string& file) : fd_(file == "-" ? STDIN_FILENO : open(file.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (fd_ < 0) fail(file);
}

Lines::~Lines() {
  if (fd_ != STDIN_FILENO) close(fd_);
}

void Lines::fail(const std::string& what) {
  throw Problem(what, "lines that can be read", std::strerror(errno), "Name a file, or - for standard input.");
}

bool Lines::next(std::string& line) {
  std::size_t end;
  while ((end = read_.find('\n', searched_)) == std::string::npos) {
    searched_ = read_.size();
    if (searched_ > kMostBytes) {
      throw Problem("line", "at most " + std::to_string(kMostBytes) + " bytes", "more", "Split it.");
    }
    if (!wait_for_input(fd_)) return false;
    char piece[1 << 16];
    const ssize_t bytes = read(fd_, piece, sizeof piece);
    if (bytes < 0) fail("lines");
    if (bytes == 0) {
      if (read_.empty()) return false;
      read_ += '\n';
    }
    read_.append(piece, static_cast<std::size_t>(bytes));
  }
  line = read_.substr(0, end > 0 && read_[end - 1] == '\r' ? end - 1 : end);
  read_.erase(0, end + 1);
  searched_ = 0;
  return true;
}

void answer_requests(Session& session, const Options& o, Lines& lines, const Print& print) {
  for (std::string line; interrupted() == 0 && lines.next(line);) {
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    Json id;
    Json said;
    const std::string wrong = problem_of([&] {
      const Json json = parse_request(line);
      if (json.is_object()) id = json.value("id", Json());
      if (id.is_number_float() && std::fabs(id.get<double>()) >= 0x1p63) {  // long integers are parsed as floats
        throw Problem("request, id", "a number of at most 64 bits, or a text", shown(std::exchange(id, Json())),
                      kCorrectRequest);
      }
      const Options asked = request_of(json, o);
      const auto stream = [&](int sequence, const std::string& text) {
        print(line_of({{"id", id}, {"sequence", sequence}, {"text", text}}));
      };
      said = report(session.generate(asked, asked.streams ? Stream(stream) : Stream()));
    });
    if (!wrong.empty()) said = {{"error", wrong}};
    said["id"] = id;
    print(line_of(said));
  }
}

void talk(Session& session, const Options& o, Lines& lines, Interruptible& signals, const Print& print) {
  Options turn = o;
  turn.goes_on = true;
  const std::size_t first = !o.system.empty() || o.empty_system ? 1 : 0;
  std::vector<Message>& said = turn.messages;
  if (first == 1) said.push_back({"system", o.system});
  const bool shows = isatty(STDIN_FILENO) == 1;
  std::string line;
  while (true) {
    if (shows) print("> ");
    if (!lines.next(line)) return;
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    said.push_back({"user", line});
    const std::string wrong = problem_of([&] {
      const Run run = answered(session, turn, first, [&](int, const std::string& text) { print(text); });
      print("\n");
      std::fprintf(stderr, "%s\n", summary(run).c_str());
      said.push_back({"assistant", run.generated.answers[0].text});
    });
    if (interrupted() == SIGINT) {
      forget_interrupt();
      signals.listen();
    }
    if (interrupted() != 0) return;
    if (!wrong.empty()) {
      std::fprintf(stderr, "pi2_runner: %s\n", wrong.c_str());
      said.pop_back();
    }
  }
}

}  // namespace pi2::runner
