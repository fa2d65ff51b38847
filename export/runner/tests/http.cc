// The runner's HTTP server without a model: pi2_http_test [WAITING CONNECTIONS BODY_BYTES REQUEST_MS IDLE_MS WRITE_MS].
// GET /health and /release are answered at once. Other requests wait for their turn: /hold waits for /release, /stream
// sends as many events of a KiB as its body says, /none gets no answer, /cut the beginning of one, all others echo
// their body.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "fields.h"
#include "http/server.h"
#include "interrupts.h"

namespace {

using namespace pi2::runner;
using std::chrono::milliseconds;

std::atomic<int> released = 0;

std::optional<Reply> at_once(const HttpRequest& request) {
  if (request.path == "/release") ++released;
  if (request.path == "/release" || request.path == "/health") return Reply{200, "{}\n"};
  return std::nullopt;
}

void answer(Exchange& exchange) {
  const std::string path = exchange.request().path, body = exchange.request().body;
  if (path == "/hold") {
    while (released == 0 && !exchange.gone() && interrupted() == 0) std::this_thread::sleep_for(milliseconds(1));
    if (released > 0) --released;
  }
  if (path == "/none") return;
  if (path == "/stream" || path == "/cut") {
    for (int i = 0; i < std::atoi(body.c_str()) && !exchange.gone(); ++i) exchange.event(std::string(1024, 'x'));
    if (path == "/stream" && !exchange.gone()) exchange.end();
  } else {
    exchange.answer({200, line_of({{"path", path}, {"body", body}, {"host", exchange.request().host}})});
  }
}

HttpLimits limits_of(int argc, char** argv) {
  HttpLimits limits;
  if (argc < 7) return limits;
  limits.waiting = std::atoi(argv[1]);
  limits.connections = std::atoi(argv[2]);
  limits.body_bytes = static_cast<std::size_t>(std::atoll(argv[3]));
  limits.request = milliseconds(std::atoi(argv[4]));
  limits.idle = milliseconds(std::atoi(argv[5]));
  limits.write = milliseconds(std::atoi(argv[6]));
  return limits;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    HttpServer server("0", limits_of(argc, argv));
    const Interruptible signals;
    server.start(at_once);
    std::printf("%s/\n", server.url().c_str());
    std::fflush(stdout);
    while (wait_for_input(server.waits())) {
      while (const std::unique_ptr<Exchange> exchange = server.next()) {
        answer(*exchange);
        std::fprintf(stderr, "%s\n", exchange->gone() ? "gone" : "answered");
        if (interrupted() != 0) break;
      }
    }
  } catch (const Problem& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 2;
  }
  raise(interrupted());
  return 0;
}
