// An HTTP answer in one piece.
#pragma once

#include <string>

namespace pi2::runner {

struct Reply {
  int status = 0;
  std::string body = "";    // JSON
  std::string header = "";  // an additional header, such as "Allow: GET"
};

// An error in OpenAI's format. `code`: for programs, such as "queue_full"; empty: none.
Reply refusal(int status, const std::string& message, const std::string& code = "");

}  // namespace pi2::runner
