#include "chat.h"

#include <algorithm>
#include <vector>

#include "fields.h"

namespace pi2::runner {
namespace {

std::string trimmed(const std::string& text) {
  constexpr const char* space = " \t\n\r\f\v";
  const std::size_t first = text.find_first_not_of(space);
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(space) + 1 - first);
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

std::string chat_text(const Json& json, const std::string& where, const std::string& user, const std::string& system) {
  const Fields fields(json, where);
  if (fields.text("format") != "torch_pi2.chat" || fields.number("version") != 1) {
    throw Problem(where, "format torch_pi2.chat, version 1",
                  fields.text("format") + ", version " + std::to_string(fields.number("version")),
                  "Use the runner of the torch_pi2 that wrote it, or export it again.");
  }
  const auto content = [strips = fields.flag("strips", false)](const std::string& text) {
    return strips ? trimmed(text) : text;
  };
  if (system.empty()) {
    const std::vector<std::string> around = parts(fields, "user", 2);
    return around[0] + content(user) + around[1];
  }
  if (!fields.has("system_user")) {
    throw Problem("--system", "a chat template with a system message", "one without", "Put it into the prompt.");
  }
  const std::vector<std::string> around = parts(fields, "system_user", 3);
  return around[0] + content(system) + around[1] + content(user) + around[2];
}

}  // namespace pi2::runner
