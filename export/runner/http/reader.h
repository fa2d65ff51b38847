// One request of HTTP/1 as it comes in, by llhttp.
#pragma once

#include <llhttp.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "http/reply.h"

namespace pi2::runner {

struct HttpRequest {
  std::string method, path, body;  // the path without a query, as it was written
  std::string host, content_type;  // of the headers; empty: not there
  bool keeps_alive = false;        // the client may send another one
  bool chunks = false;             // it takes an answer in chunks: HTTP/1.1
};

class HttpReader {
 public:
  static constexpr std::size_t kMostHeader = 16 << 10;  // bytes of the first line and the headers
  static constexpr std::size_t kMostBody = 16 << 20;    // as a line of --requests

  HttpReader();
  HttpReader(const HttpReader&) = delete;
  HttpReader& operator=(const HttpReader&) = delete;

  // Takes what came, and returns how much of it belongs to this request: what is behind it is the next one's. Nothing
  // more once it is whole or wrong.
  std::size_t take(std::string_view bytes);

  bool begun() const { return begun_; }
  bool whole() const { return whole_; }
  // An error of the request, with which its connection ends; status 0: none.
  const Reply& wrong() const { return wrong_; }
  // Once: the client waits for "100 Continue" before it sends the body.
  bool take_continue();
  std::size_t body_bytes() const { return request_.body.size(); }
  HttpRequest& request() { return request_; }

 private:
  static const llhttp_settings_t& settings();
  static HttpReader& of(llhttp_t* parser) { return *static_cast<HttpReader*>(parser->data); }
  int fail(int status, const std::string& message);
  int add(std::string& to, const char* at, std::size_t bytes);  // of the first line and the headers
  int header();
  int headers();
  int body(const char* at, std::size_t bytes, std::uint64_t all);

  llhttp_t parser_;
  HttpRequest request_;
  std::string name_, value_;  // of the header that is read
  std::size_t header_bytes_ = 0;
  bool begun_ = false, whole_ = false, waits_ = false;
  Reply wrong_;
};

}  // namespace pi2::runner
