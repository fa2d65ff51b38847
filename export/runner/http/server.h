// HTTP for few clients: a thread that reads requests and writes answers, which are made elsewhere, one after the other.
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
  int waiting = 16;      // requests behind the one that is answered; more get 503
  int connections = 32;  // at once; one more takes the place of who has been silent for longest
  std::size_t body_bytes = 2 * HttpReader::kMostBody;  // of all requests that come in
  std::chrono::milliseconds request{30'000};           // from its first byte to its last
  std::chrono::milliseconds idle{60'000};              // until the next one of a connection
  std::chrono::milliseconds write{30'000};             // in which a client that is written to takes something
};

// To who is not answered any more, with 503.
constexpr const char* kServerEnds = "runner: expected one that goes on, found that it ends. Ask it when it is back.";

class HttpServer;

// A request that is answered, and where the answer goes. What is said to a client that has gone is dropped.
class Exchange {
 public:
  ~Exchange();  // An answer that was not given is an error; one that was not ended is cut.
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  const HttpRequest& request() const;  // until it is answered
  bool gone() const;
  void answer(const Reply& reply);
  // Instead of it, Server-Sent Events: the first begins an answer with status 200.
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
  // What can be answered at once, by the thread of the server; nothing: the request waits for its turn.
  using AtOnce = std::function<std::optional<Reply>(const HttpRequest&)>;

  // `address`: [HOST:]PORT, HOST an address of this machine (127.0.0.1; IPv6 in brackets) or localhost; port 0: one
  // that is free. Takes it, and nobody is let in yet. Throws Problem: that is none, or it is taken.
  explicit HttpServer(const std::string& address, const HttpLimits& limits = {});
  ~HttpServer();  // Waits, not for long, until what was answered is written.
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  const std::string& host() const;  // without brackets
  std::string url() const;
  bool is_local() const;  // only this machine can reach it

  // Lets clients in. Throws Problem.
  void start(AtOnce at_once);
  // Can be read from while a request waits.
  int waits() const;
  // The next one; nullptr: none waits.
  std::unique_ptr<Exchange> next();

 private:
  friend class Exchange;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pi2::runner
