// Parses one HTTP/1 request as it arrives, with llhttp.
#pragma once

#include <llhttp.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "http/reply.h"

namespace pi2::runner {

struct HttpRequest {
  std::string method, path, body;  // path: without query, not decoded
  std::string host, content_type;  // headers; empty: missing
  bool keeps_alive = false;        // the client may send another request
  bool chunks = false;             // it accepts chunked answers (HTTP/1.1)
};

class HttpReader {
 public:
  static constexpr std::size_t kMostHeader = 16 << 10;  // bytes of request line and headers
  static constexpr std::size_t kMostBody = 16 << 20;    // like a line of --requests

  HttpReader();
  HttpReader(const HttpReader&) = delete;
  HttpReader& operator=(const HttpReader&) = delete;

  // Parses input and returns how many bytes belong to this request; the rest belongs to the next one. 0 once the
  // request is complete or refused.
  std::size_t take(std::string_view bytes);

  bool begun() const { return begun_; }
  bool whole() const { return whole_; }
  // The error of the request, after which the connection is closed; status 0: none.
  const Reply& wrong() const { return wrong_; }
  // True once if the client waits for "100 Continue" before it sends the body.
  bool take_continue();
  std::size_t body_bytes() const { return request_.body.size(); }
  HttpRequest& request() { return request_; }

 private:
  static const llhttp_settings_t& settings();
  static HttpReader& of(llhttp_t* parser) { return *static_cast<HttpReader*>(parser->data); }
  int fail(int status, const std::string& message);
  int add(std::string& to, const char* at, std::size_t bytes);  // for request line and headers
  int header();
  int headers();
  int body(const char* at, std::size_t bytes, std::uint64_t all);

  llhttp_t parser_;
  HttpRequest request_;
  std::string name_, value_;  // of the current header
  std::size_t header_bytes_ = 0;
  bool begun_ = false, whole_ = false, waits_ = false;
  Reply wrong_;
};

}  // namespace pi2::runner
