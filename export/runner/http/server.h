// An HTTP server for few clients: one thread reads requests and writes answers. Another thread answers them one by one.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "http/reader.h"
#include "http/reply.h"

namespace pi2::runner {

struct HttpLimits {
  int waiting = 16;      // waiting requests; further ones get 503
  int connections = 32;  // at once; a further one replaces the one that is idle for longest
  std::size_t body_bytes = 2 * HttpReader::kMostBody;  // of all requests being received
  std::chrono::milliseconds request{30'000};           // from the first byte of a request to its last
  std::chrono::milliseconds idle{60'000};              // until the next request of a connection
  std::chrono::milliseconds write{30'000};             // without progress while writing to a client
};

// The 503 for requests that are no longer answered.
constexpr const char* kServerEnds = "runner: expected one that goes on, found that it ends. Ask it when it is back.";

class HttpServer;

// A request and its answer. Answers to clients that have disconnected are dropped.
class Exchange {
 public:
  ~Exchange();  // sends an error if nothing was answered; cuts an unfinished stream
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  const HttpRequest& request() const;  // valid until it is answered
  bool gone() const;
  void answer(const Reply& reply);
  // Server-Sent Events instead of a reply: the first one starts an answer with status 200.
  void event(std::string_view data);
  bool begun() const { return begun_; }
  void end();

 private:
  friend class HttpServer;
  struct Connection;
  Exchange(HttpServer& server, std::shared_ptr<Connection> connection);
  void say(std::string text, bool last);

  HttpServer& server_;
  std::shared_ptr<Connection> connection_;
  bool begun_ = false, ended_ = false;
};

class HttpServer {
 public:
  // Answers by the server's own thread; nothing: the request waits for its turn.
  using AtOnce = std::function<std::optional<Reply>(const HttpRequest&)>;

  // `address`: [HOST:]PORT; HOST is an address of this machine (default 127.0.0.1; IPv6 in brackets) or localhost; port
  // 0: any free port. Binds it, without accepting clients yet. Throws Problem for an invalid address or a port in use.
  explicit HttpServer(const std::string& address, const HttpLimits& limits = {});
  ~HttpServer();  // waits a short time until answers are written
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  const std::string& host() const;  // without brackets
  std::string url() const;
  bool is_local() const;  // only this machine can reach it

  // Starts accepting clients. Throws Problem.
  void start(AtOnce at_once);
  // A file descriptor that is readable while a request waits.
  int waits() const;
  // The next waiting request, or null.
  std::unique_ptr<Exchange> next();

 private:
  friend class Exchange;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pi2::runner
