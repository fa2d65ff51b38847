// pi2_runner: generates text with a bundle of torch_pi2.export. Options: see options.cc.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <optional>
#include <utility>

#include "measure.h"
#include "output.h"
#include "requests.h"
#include "serve.h"

namespace pi2::runner {
namespace {

// Prints to standard error if standard output receives a file.
void say(const Options& o, const std::string& text) {
  const bool taken = o.trace == "-" || o.etdump == "-" || o.logits == "-";
  if (!taken) return print(text);
  std::fputs(text.c_str(), stderr);
}

std::string answers(const Run& run, bool has_text) {
  const bool several = run.options.request.sequences > 1;
  std::string text;
  int number = 0;
  for (const Answer& answer : run.generated.answers) {
    if (several) text += "[" + std::to_string(number++) + "] ";
    if (!has_text) {
      text += "ids:";
      for (const std::int64_t id : answer.ids) text += " " + std::to_string(id);
    } else if (several) {
      text += answer.text;
    }
    text += '\n';
  }
  return text;
}

// Generates and prints one answer and its summary.
void answer(Session& session, const Options& o) {
  const bool streams = !o.json && o.request.sequences == 1;
  std::string before = streams && !o.chat ? o.prompt : "";  // printed once the prompt is known to be valid
  const auto show = [&](int, const std::string& text) { say(o, std::exchange(before, "") + text); };
  Run run = session.generate(o, streams ? Stream(show) : Stream());
  if (!before.empty()) say(o, before);
  session.close();  // writes the trace before success is reported
  if (o.json) {
    say(o, line_of(report(run)));
    return;
  }
  say(o, answers(run, session.has_tokenizer()));
  std::fprintf(stderr, "%s\n", summary(run).c_str());
}

// Answers all requests and closes the session.
void answer_all(Session& session, const Options& o, Lines* lines, Interruptible& signals) {
  const Print print = [&](const std::string& text) { say(o, text); };
  if (o.repeat > 0) {
    const Json found = measure(session, o);
    say(o, o.json ? line_of(found) : measured_text(found));
  } else if (!o.requests.empty()) {
    answer_requests(session, o, *lines, print);
  } else {
    talk(session, o, *lines, signals, print);
  }
  session.close();
}

// If standard descriptors are closed, files opened later would get their numbers and receive printed text. Opens them
// read-only, so that printing fails.
void open_standard_files() {
  for (int fd = 0; fd < 3; ++fd) {
    if (fcntl(fd, F_GETFD) == -1 && open("/dev/null", O_RDONLY) != fd) std::abort();
  }
}

int main(int argc, char** argv) {
  Options o = parse_options(argc, argv);
  if (o.help) {
    print(kUsage);
    return 0;
  }
  o.request.stopped = [] { return interrupted() != 0; };
  keep_log();
  std::optional<HttpServer> server;  // binds its port before anything is loaded
  if (!o.http.empty()) server.emplace(o.http);
  std::optional<Lines> lines;  // opened before signals are recorded: opening a FIFO waits for its writer
  if (o.talks || !o.requests.empty()) lines.emplace(o.talks ? "-" : o.requests);
  Interruptible signals;  // from before files are started until they are complete
  Session session(o);
  if (server) {
    serve_http(session, o, *server, [&](const std::string& text) { say(o, text); });
    server.reset();
    session.close();
  } else if (lines || o.repeat > 0) {
    answer_all(session, o, lines ? &*lines : nullptr, signals);
  } else {
    answer(session, o);
  }
  return 0;
}

// Allocates nothing.
void say_no_memory() {
  constexpr char kText[] =
      "pi2_runner: memory: expected enough for the bundle and the answers, found none. Give it more, or a smaller "
      "--budget.\n";
  (void)!write(STDERR_FILENO, kText, sizeof(kText) - 1);
}

// Terminate handler: reports why, for example if a destructor of a JSON value runs out of memory.
[[noreturn]] void last_words() {
  try {
    if (std::current_exception() != nullptr) std::rethrow_exception(std::current_exception());
  } catch (const std::bad_alloc&) {
    say_no_memory();
    _exit(2);
  } catch (...) {
  }
  std::abort();
}

}  // namespace
}  // namespace pi2::runner

int main(int argc, char** argv) {
  pi2::runner::open_standard_files();
  signal(SIGPIPE, SIG_IGN);  // becomes a reported write error
  std::set_terminate(pi2::runner::last_words);
  int code = 2;
  try {
    code = pi2::runner::main(argc, argv);
  } catch (const std::bad_alloc&) {
    pi2::runner::say_no_memory();
  } catch (const std::exception& error) {
    std::fflush(stdout);
    std::fprintf(stderr, "pi2_runner: %s\n", error.what());
  }
  // The parent process sees which signal ended the program.
  if (const int signal = pi2::runner::interrupted(); signal != 0) raise(signal);
  return code;
}
