#include "http/reply.h"

#include "fields.h"

namespace pi2::runner {

Reply refusal(int status, const std::string& message, const std::string& code) {
  const Json error = {{"message", message},
                      {"type", status < 500 ? "invalid_request_error" : "server_error"},
                      {"param", Json()},
                      {"code", code.empty() ? Json() : Json(code)}};
  return {status, line_of({{"error", error}}), status == 503 ? "Retry-After: 1" : ""};
}

}  // namespace pi2::runner
