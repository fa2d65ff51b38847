#include "chat.h"

#include <algorithm>
#include <vector>

#include "fields.h"
#include "tokenizer/utf8.h"

namespace pi2::runner {
namespace {

// What Python's str.strip takes for white space.
bool is_space(char32_t c) {
  return (c >= 0x9 && c <= 0xd) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

std::string trimmed(const std::string& text) {
  std::size_t begin = std::string::npos, end = 0;
  for (std::size_t at = 0; at < text.size();) {
    const CodePoint c = code_point(text, at);
    if (!is_space(c.value)) {
      begin = std::min(begin, at);
      end = at + c.bytes;
    }
    at += c.bytes;
  }
  return end == 0 ? "" : text.substr(begin, end - begin);
}

// The parts of a template, of which there is one more than messages.
std::vector<std::string> parts(const Fields& fields, const char* name, std::size_t count) {
  const Json& list = fields.list(name);
  if (list.size() != count || !std::all_of(list.begin(), list.end(), [](const Json& v) { return v.is_string(); })) {
    throw Problem(fields.where() + ", " + name, std::to_string(count) + " texts", shown(list),
                  "Export the bundle again.");
  }
  return list.get<std::vector<std::string>>();
}

}  // namespace

std::string chat_text(const Json& json, const std::string& where, const std::string& user, const std::string* system) {
  const Fields fields(json, where);
  if (fields.text("format") != "torch_pi2.chat" || fields.number("version") != 2) {
    throw Problem(where, "format torch_pi2.chat, version 2",
                  fields.text("format") + ", version " + std::to_string(fields.number("version")),
                  "Use the runner of the torch_pi2 that wrote it, or export it again.");
  }
  const Fields strips = fields.sub("strips");
  const auto content = [&](const char* role, const std::string& text) {
    return strips.flag(role, false) ? trimmed(text) : text;
  };
  if (system == nullptr) {
    const std::vector<std::string> around = parts(fields, "user", 2);
    return around[0] + content("user", user) + around[1];
  }
  if (!fields.has("system_user")) {
    throw Problem("--system", "a chat template that writes a system message as it is",
                  "one that takes none, or does more with it", "Put it into the prompt.");
  }
  const std::vector<std::string> around = parts(fields, "system_user", 3);
  return around[0] + content("system", *system) + around[1] + content("user", user) + around[2];
}

}  // namespace pi2::runner
