#include "http/reader.h"

#include <algorithm>
#include <utility>

namespace pi2::runner {
namespace {

std::string lower(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

}  // namespace

HttpReader::HttpReader() {
  llhttp_init(&parser_, HTTP_REQUEST, &settings());
  parser_.data = this;
}

int HttpReader::fail(int status, const std::string& message) {
  wrong_ = refusal(status, message);
  return HPE_USER;
}

int HttpReader::add(std::string& to, const char* at, std::size_t bytes) {
  header_bytes_ += bytes;
  if (header_bytes_ > kMostHeader) {
    return fail(431, "headers: expected at most " + std::to_string(kMostHeader) + " bytes, found more. Send fewer.");
  }
  to.append(at, bytes);
  return 0;
}

int HttpReader::header() {
  const std::string name = lower(std::exchange(name_, "")), value = std::exchange(value_, "");
  std::string* const to = name == "host" ? &request_.host : name == "content-type" ? &request_.content_type : nullptr;
  if (to != nullptr && !to->empty()) return fail(400, name + ": expected one header, found several. Send one.");
  if (to != nullptr) *to = lower(value.substr(0, value.find_last_not_of(" \t") + 1));
  if (name == "expect" && lower(value) == "100-continue") waits_ = true;
  header_bytes_ += 4;  // separators
  return add(name_, "", 0);
}

int HttpReader::headers() {
  const bool old = llhttp_get_http_major(&parser_) == 1 && llhttp_get_http_minor(&parser_) == 0;
  if (llhttp_get_http_major(&parser_) != 1) return fail(505, "request: expected HTTP/1.1, found another version.");
  if (request_.host.empty() && !old) return fail(400, "host: expected the header, found none. Send it.");
  request_.method = llhttp_method_name(static_cast<llhttp_method_t>(llhttp_get_method(&parser_)));
  request_.path.resize(std::min(request_.path.find('?'), request_.path.size()));
  request_.chunks = !old;
  request_.keeps_alive = llhttp_should_keep_alive(&parser_) == 1;
  // Refuses by content-length before the body arrives, unless it is chunked.
  return parser_.content_length > kMostBody ? body("", 0, parser_.content_length) : 0;
}

int HttpReader::body(const char* at, std::size_t bytes, std::uint64_t all) {
  if (all > kMostBody) {
    return fail(413, "body: expected at most " + std::to_string(kMostBody) + " bytes, found more. Send less.");
  }
  request_.body.append(at, bytes);
  return 0;
}

const llhttp_settings_t& HttpReader::settings() {
  static const llhttp_settings_t made = [] {
    llhttp_settings_t s;
    llhttp_settings_init(&s);
    s.on_message_begin = [](llhttp_t* p) { return of(p).begun_ = true, 0; };
    s.on_url = [](llhttp_t* p, const char* at, std::size_t n) { return of(p).add(of(p).request_.path, at, n); };
    s.on_header_field = [](llhttp_t* p, const char* at, std::size_t n) { return of(p).add(of(p).name_, at, n); };
    s.on_header_value = [](llhttp_t* p, const char* at, std::size_t n) { return of(p).add(of(p).value_, at, n); };
    s.on_header_value_complete = [](llhttp_t* p) { return of(p).header(); };
    s.on_headers_complete = [](llhttp_t* p) { return of(p).headers() == 0 ? 0 : -1; };
    s.on_body = [](llhttp_t* p, const char* at, std::size_t n) { return of(p).body(at, n, of(p).body_bytes() + n); };
    s.on_message_complete = [](llhttp_t* p) {
      of(p).whole_ = true;
      return static_cast<int>(HPE_PAUSED);  // the rest belongs to the next request
    };
    return s;
  }();
  return made;
}

std::size_t HttpReader::take(std::string_view bytes) {
  if (whole_ || wrong_.status != 0) return 0;
  const llhttp_errno_t error = llhttp_execute(&parser_, bytes.data(), bytes.size());
  if (error == HPE_OK) return bytes.size();
  // Upgrades (Java offers HTTP/2 this way) are ignored; the request is answered.
  if (!whole_ && wrong_.status == 0) {
    fail(400, std::string("request: expected HTTP/1.1, found none: ") + llhttp_get_error_reason(&parser_) + ".");
  }
  return whole_ ? static_cast<std::size_t>(llhttp_get_error_pos(&parser_) - bytes.data()) : bytes.size();
}

bool HttpReader::take_continue() {
  const bool now = waits_ && !request_.method.empty() && !whole_ && wrong_.status == 0;
  if (now) waits_ = false;
  return now;
}

}  // namespace pi2::runner
