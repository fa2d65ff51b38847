#include "http/server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <deque>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "problem.h"

namespace pi2::runner {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kLinger{2'000};  // time to discard input after the answer: closing at once could lose the answer
constexpr std::size_t kMostBehind = 4 << 20;  // unsent bytes of a stream
constexpr const char* kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
constexpr milliseconds kNoFiles{200};  // wait before accepting again, if there was no file descriptor

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  operator int() const { return fd_; }

 private:
  int fd_;
};

const char* phrase(int status) {
  switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 413: return "Content Too Large";
    case 415: return "Unsupported Media Type";
    case 431: return "Request Header Fields Too Large";
    case 503: return "Service Unavailable";
    case 505: return "HTTP Version Not Supported";
    default: return "Internal Server Error";
  }
}

std::string head(int status, const std::string& headers, bool keeps_alive) {
  return "HTTP/1.1 " + std::to_string(status) + " " + phrase(status) + "\r\n" + headers +
         (keeps_alive ? "" : "Connection: close\r\n") + "\r\n";
}

std::string written(const Reply& reply, const HttpRequest& request) {
  const std::string more = reply.header.empty() ? "" : reply.header + "\r\n";
  return head(reply.status,
              "Content-Type: application/json\r\nContent-Length: " + std::to_string(reply.body.size()) + "\r\n" + more,
              request.keeps_alive) +
         (request.method == "HEAD" ? "" : reply.body);
}

std::string chunk(std::string_view data) {
  char size[16];
  const auto end = std::to_chars(size, size + sizeof size, data.size(), 16).ptr;
  return std::string(size, end) + "\r\n" + std::string(data) + "\r\n";
}

}  // namespace

// The connection of one client. Guarded by the server's mutex, except `gone` and the request while it is answered.
struct Exchange::Connection {
  enum class Stage {
    kReads,    // reads or waits for a request
    kAnswers,  // answers; reads nothing meanwhile
    kLingers   // the last answer is written
  };

  explicit Connection(int socket) : fd(socket) {}

  Fd fd;
  Stage stage = Stage::kReads;
  std::unique_ptr<HttpReader> reader = std::make_unique<HttpReader>();
  std::string behind;  // input that belongs to the next request
  std::string out;     // to write
  bool said = false;   // part of the answer has been in `out`
  bool last = false;   // all of the answer has been in `out`
  bool half = false;   // the client has closed its sending side
  bool keeps_alive = false;
  Clock::time_point since = Clock::now();  // start of the current wait, for timeouts
  std::atomic<bool> gone{false};
};

struct HttpServer::State {
  using Connection = Exchange::Connection;
  using Stage = Connection::Stage;

  State(int socket, const HttpLimits& l)
      : limits(l),
        listening(socket),
        wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        asked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  const HttpLimits limits;
  std::string host;
  int port = 0;
  bool local = false;
  Fd listening, wake, asked;
  AtOnce at_once;
  std::thread thread;

  std::mutex mutex;  // guards the members below
  std::list<std::shared_ptr<Connection>> connections;
  std::deque<std::shared_ptr<Connection>> queue;
  Clock::time_point no_files_until{};
  std::optional<Clock::time_point> end;  // deadline for writing answers

  void awake() {
    const std::uint64_t one = 1;
    (void)!write(wake, &one, sizeof one);
  }

  static void quiet(int counter) {
    std::uint64_t count;
    (void)!read(counter, &count, sizeof count);
  }

  // When the connection times out.
  Clock::time_point due(const Connection& c) const {
    if (!c.out.empty()) return c.since + limits.write;
    if (c.stage == Stage::kReads) return c.since + (c.reader->begun() ? limits.request : limits.idle);
    return c.stage == Stage::kLingers ? c.since + kLinger : Clock::time_point::max();
  }

  short events(const Connection& c) const {
    short wanted = c.half ? 0 : POLLRDHUP;
    if (c.stage != Stage::kAnswers) wanted |= POLLIN;
    if (!c.out.empty()) wanted |= POLLOUT;
    return wanted;
  }

  void run() {
    std::vector<pollfd> polled;
    std::vector<std::shared_ptr<Connection>> whose;
    for (std::unique_lock<std::mutex> lock(mutex); !(end && (all_answered() || Clock::now() >= *end));) {
      const auto now = Clock::now();
      const bool listens = !end && now >= no_files_until;
      auto first = end ? *end : listens ? Clock::time_point::max() : no_files_until;
      polled = {{wake, POLLIN, 0}, {listens ? static_cast<int>(listening) : -1, POLLIN, 0}};
      whose.assign(connections.begin(), connections.end());
      for (const auto& c : whose) {
        polled.push_back({c->fd, events(*c), 0});
        first = std::min(first, due(*c));
      }
      const bool never = first == Clock::time_point::max();
      const auto left = never ? milliseconds(-1) : std::chrono::ceil<milliseconds>(std::max(first, now) - now);
      lock.unlock();
      poll(polled.data(), polled.size(), static_cast<int>(left.count()));
      lock.lock();
      if ((polled[0].revents & POLLIN) != 0) quiet(wake);
      for (std::size_t i = 0; i < whose.size(); ++i) serve(*whose[i], polled[i + 2].revents);
      const auto gone = [](const auto& c) { return c->gone.load(); };
      connections.remove_if(gone);
      std::erase_if(queue, gone);
      if ((polled[1].revents & POLLIN) != 0) let_in();
    }
  }

  // Whether all answers are written. Waiting clients are refused only after `end` is set.
  bool all_answered() const {
    return std::all_of(connections.begin(), connections.end(),
                       [](const auto& c) { return c->stage != Stage::kAnswers && c->out.empty(); });
  }

  void let_in() {
    const int socket = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
        no_files_until = Clock::now() + kNoFiles;
      return;
    }
    const int yes = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    connections.push_back(std::make_shared<Connection>(socket));
    if (std::ssize(connections) <= limits.connections) return;
    const auto silent = std::min_element(connections.begin(), connections.end(), [](const auto& a, const auto& b) {
      return std::pair(a->stage == Stage::kAnswers, a->since) < std::pair(b->stage == Stage::kAnswers, b->since);
    });
    (*silent)->gone = true;
    connections.erase(silent);
  }

  // Handles poll events of a connection.
  void serve(Connection& c, short what) {
    if ((what & (POLLERR | POLLNVAL)) != 0) c.gone = true;
    if (c.stage == Stage::kAnswers && (what & POLLHUP) != 0) c.gone = true;
    if (c.stage == Stage::kAnswers && (what & POLLRDHUP) != 0) half_closed(c);
    if (!c.gone && (what & (POLLIN | POLLHUP)) != 0 && c.stage != Stage::kAnswers) read_some(c);
    if (!c.gone) write_some(c);
    if (!c.gone && Clock::now() >= due(c)) c.gone = true;
  }

  // The client closed its sending side, or both: then writing fails. If an answer takes long, writes "100 Continue" to
  // find out; HTTP/1.1 clients ignore it.
  void half_closed(Connection& c) {
    c.half = true;
    if (c.said) return;
    c.gone = !c.reader->request().chunks;
    c.out += kContinue;
    c.since = Clock::now();
  }

  void read_some(Connection& c) {
    char piece[1 << 16];
    const ssize_t bytes = recv(c.fd, piece, sizeof piece, 0);
    if (bytes == 0 || (bytes < 0 && errno != EAGAIN && errno != EINTR)) {
      c.gone = true;
    } else if (bytes > 0 && c.stage == Stage::kReads) {
      take(c, std::string_view(piece, static_cast<std::size_t>(bytes)));
    }
  }

  // Feeds input to the parser.
  void take(Connection& c, std::string_view bytes) {
    const bool begun = c.reader->begun();
    const std::size_t taken = c.reader->take(bytes);
    if (!begun && c.reader->begun()) c.since = Clock::now();
    if (c.reader->take_continue()) c.out += kContinue;
    std::size_t bodies = 0;
    for (const auto& each : connections) bodies += each->reader->body_bytes();
    HttpRequest& request = c.reader->request();
    if (c.reader->wrong().status != 0) {
      request.keeps_alive = false;
      reply(c, c.reader->wrong());
    } else if (bodies > limits.body_bytes) {
      request.keeps_alive = false;
      reply(c, refusal(503,
                       "requests: expected at most " + std::to_string(limits.body_bytes) +
                           " bytes at once, found more. Ask again later.",
                       "queue_full"));
    } else if (c.reader->whole()) {
      c.behind = bytes.substr(taken);
      if (const std::optional<Reply> known = at_once(request)) {
        reply(c, *known);
      } else if (end || std::ssize(queue) >= limits.waiting) {
        reply(c, refusal(503,
                         "requests: expected at most " + std::to_string(limits.waiting) +
                             " that wait, found as many. Ask again later.",
                         "queue_full"));
      } else {
        c.stage = Stage::kAnswers;
        queue.push_back(
            *std::find_if(connections.begin(), connections.end(), [&](const auto& each) { return each.get() == &c; }));
        const std::uint64_t one = 1;
        (void)!write(asked, &one, sizeof one);
      }
    }
  }

  void reply(Connection& c, const Reply& reply) {
    c.stage = Stage::kAnswers;
    c.out += written(reply, c.reader->request());
    c.said = c.last = true;
    c.since = Clock::now();
  }

  void write_some(Connection& c) {
    while (!c.out.empty()) {
      const ssize_t bytes = send(c.fd, c.out.data(), c.out.size(), MSG_NOSIGNAL);
      if (bytes < 0 && errno == EINTR) continue;
      if (bytes < 0 && errno != EAGAIN) c.gone = true;
      if (bytes < 0) return;
      c.out.erase(0, static_cast<std::size_t>(bytes));
      c.since = Clock::now();
    }
    if (c.stage == Stage::kAnswers && c.last) ended(c);
  }

  // An answer is written: goes on with the next request, or closes.
  void ended(Connection& c) {
    const bool goes_on = c.reader->request().keeps_alive && !end;
    c.stage = goes_on ? Stage::kReads : Stage::kLingers;
    c.said = c.last = false;
    c.since = Clock::now();
    c.reader = std::make_unique<HttpReader>();
    if (!goes_on) {
      shutdown(c.fd, SHUT_WR);
    } else if (!c.behind.empty()) {
      take(c, std::exchange(c.behind, ""));
      if (!c.out.empty()) awake();  // so that it is written
    }
  }
};

Exchange::Exchange(HttpServer& server, std::shared_ptr<Connection> connection)
    : server_(server), connection_(std::move(connection)) {}

Exchange::~Exchange() {
  if (begun_ && !ended_) {
    const std::lock_guard<std::mutex> lock(server_.state_->mutex);
    connection_->reader->request().keeps_alive =
        false;  // without the last chunk the client sees that the answer is incomplete
    connection_->last = true;
    server_.state_->awake();
  } else if (!ended_) {
    answer(refusal(500, "request: expected an answer, found none. See what the runner says on standard error."));
  }
}

const HttpRequest& Exchange::request() const { return connection_->reader->request(); }

bool Exchange::gone() const { return connection_->gone; }

void Exchange::say(std::string text, bool last) {
  const std::lock_guard<std::mutex> lock(server_.state_->mutex);
  Connection& c = *connection_;
  if (c.gone) return;
  if (begun_ && c.out.size() > kMostBehind) c.gone = true;
  if (c.out.empty()) c.since = Clock::now();
  c.out += text;
  c.said = true;
  c.last = last;
  server_.state_->awake();
}

void Exchange::answer(const Reply& reply) {
  ended_ = true;
  say(written(reply, request()), true);
}

void Exchange::event(std::string_view data) {
  std::string text;
  if (!begun_) {
    HttpRequest& asked = connection_->reader->request();
    if (!asked.chunks) asked.keeps_alive = false;  // ends with the connection
    const std::string headers = "Content-Type: text/event-stream\r\nCache-Control: no-store\r\n";
    text = head(200, headers + (asked.chunks ? "Transfer-Encoding: chunked\r\n" : ""), asked.keeps_alive);
  }
  begun_ = true;
  const std::string piece = "data: " + std::string(data) + "\n\n";
  say(text + (request().chunks ? chunk(piece) : piece), false);
}

void Exchange::end() {
  ended_ = true;
  say(request().chunks ? chunk("") : "", true);
}

namespace {

struct Address {
  sockaddr_storage bytes{};
  socklen_t size = 0;
  std::string host;
};

Address address_of(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  std::string host = colon == std::string::npos ? "127.0.0.1" : text.substr(0, colon);
  const std::string port_text = text.substr(colon == std::string::npos ? 0 : colon + 1);
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(port_text.data(), port_text.data() + port_text.size(), port);
  const bool is_port = error == std::errc() && end == port_text.data() + port_text.size();
  if (host == "localhost") host = "127.0.0.1";
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  Address found;
  if (bracketed) {
    auto* six = reinterpret_cast<sockaddr_in6*>(&found.bytes);
    host = host.substr(1, host.size() - 2);
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(port);
    if (inet_pton(AF_INET6, host.c_str(), &six->sin6_addr) == 1) found.size = sizeof *six;
  } else {
    auto* four = reinterpret_cast<sockaddr_in*>(&found.bytes);
    four->sin_family = AF_INET;
    four->sin_port = htons(port);
    if (inet_pton(AF_INET, host.c_str(), &four->sin_addr) == 1) found.size = sizeof *four;
  }
  if (found.size == 0 || !is_port) {
    throw Problem("--http", "[HOST:]PORT, such as 8000, 127.0.0.1:8000 or [::1]:8000, port 0: any that is free",
                  "'" + text + "'", "HOST is an address of this machine; without it 127.0.0.1.");
  }
  found.host = host;
  return found;
}

bool is_loopback(const Address& address) {
  if (address.bytes.ss_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(&address.bytes)->sin6_addr);
  }
  return (ntohl(reinterpret_cast<const sockaddr_in*>(&address.bytes)->sin_addr.s_addr) >> 24) == 127;
}

[[noreturn]] void refused(const std::string& address) {
  throw Problem("--http " + address, "an address and a port that can be listened on", std::strerror(errno),
                "Name another port (0: any that is free), or another address of this machine.");
}

}  // namespace

HttpServer::HttpServer(const std::string& text, const HttpLimits& limits) {
  Address address = address_of(text);
  state_ =
      std::make_unique<State>(socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), limits);
  State& s = *state_;
  auto* bytes = reinterpret_cast<sockaddr*>(&address.bytes);
  const int yes = 1;
  if (s.listening < 0 || s.wake < 0 || s.asked < 0) refused(text);
  setsockopt(s.listening, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (bind(s.listening, bytes, address.size) != 0 || getsockname(s.listening, bytes, &address.size) != 0) refused(text);
  s.host = address.host;
  s.local = is_loopback(address);
  s.port = ntohs(address.bytes.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(bytes)->sin6_port
                                                     : reinterpret_cast<sockaddr_in*>(bytes)->sin_port);
}

HttpServer::~HttpServer() {
  if (!state_->thread.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->end = Clock::now() + kLinger;
  }
  while (std::unique_ptr<Exchange> left = next()) left->answer(refusal(503, kServerEnds, "server_ends"));
  state_->awake();
  state_->thread.join();
}

const std::string& HttpServer::host() const { return state_->host; }

std::string HttpServer::url() const {
  const bool six = state_->host.find(':') != std::string::npos;
  return "http://" + (six ? "[" + state_->host + "]" : state_->host) + ":" + std::to_string(state_->port);
}

bool HttpServer::is_local() const { return state_->local; }

void HttpServer::start(AtOnce at_once) {
  state_->at_once = std::move(at_once);
  if (listen(state_->listening, SOMAXCONN) != 0) refused(url());
  // Signals go to the thread that answers.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::string wrong;
  try {
    state_->thread = std::thread([state = state_.get()] { state->run(); });
    pthread_setname_np(state_->thread.native_handle(), "pi2-http");
  } catch (const std::system_error& error) {
    wrong = error.what();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!wrong.empty()) throw Problem("--http", "one more thread", wrong, "Raise the limit of threads.");
}

int HttpServer::waits() const { return state_->asked; }

std::unique_ptr<Exchange> HttpServer::next() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->queue.empty()) {
    State::quiet(state_->asked);
    return nullptr;
  }
  const std::shared_ptr<Exchange::Connection> first = state_->queue.front();
  state_->queue.pop_front();
  return std::unique_ptr<Exchange>(new Exchange(*this, first));
}

}  // namespace pi2::runner
