#include "chat.h"

#include <algorithm>
#include <vector>

#include "fields.h"
#include "tokenizer/utf8.h"

namespace pi2::runner {
namespace {

// White space as in Python's str.strip.
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

// The parts of a template: one more than messages.
std::vector<std::string> parts(const Fields& fields, const char* name, std::size_t count) {
  const Json& list = fields.list(name);
  if (list.size() != count || !std::all_of(list.begin(), list.end(), [](const Json& v) { return v.is_string(); })) {
    throw Problem(fields.where() + ", " + name, std::to_string(count) + " texts", shown(list),
                  "Export the bundle again.");
  }
  return list.get<std::vector<std::string>>();
}

}  // namespace

std::string chat_text(const Json& json, const std::string& where, const std::vector<Message>& messages) {
  const Fields fields(json, where);
  if (fields.text("format") != "torch_pi2.chat" || fields.number("version") != 3) {
    throw Problem(where, "format torch_pi2.chat, version 3",
                  fields.text("format") + ", version " + std::to_string(fields.number("version")),
                  "Use the runner of the torch_pi2 that wrote it, or export it again.");
  }
  const bool system = !messages.empty() && messages[0].role == "system";
  if (system && !fields.has("system_user")) {
    throw Problem("system message", "a chat template that writes a system message as it is",
                  "one that takes none, or does more with it", "Put it into the prompt.");
  }
  const std::size_t first = system ? 1 : 0;
  bool turns = messages.size() > first && (messages.size() - first) % 2 == 1;
  for (std::size_t i = first; i < messages.size() && turns; ++i) {
    turns = messages[i].role == ((i - first) % 2 == 0 ? "user" : "assistant");
  }
  if (!turns) {
    std::string roles;
    for (const Message& message : messages) roles += (roles.empty() ? "" : ", ") + message.role;
    throw Problem("messages", "user, or user, assistant, user and so on, a system message before them or none",
                  roles.empty() ? "none" : printable(roles, 80), "A question is the last, and answers come between.");
  }
  if (messages.size() > first + 1 && !fields.has("assistant")) {
    throw Problem("messages", "a chat template that writes earlier answers as they are", "one that does more with them",
                  "Begin a new talk with each question; torch-pi2 run takes messages.");
  }
  const Fields strips = fields.sub("strips");
  const auto content = [&](const Message& message) {
    return strips.flag(message.role.c_str(), false) ? trimmed(message.content) : message.content;
  };
  const std::vector<std::string> around = system ? parts(fields, "system_user", 3) : parts(fields, "user", 2);
  std::string text = around[0] + content(messages[0]);
  if (system) text += around[1] + content(messages[1]);
  if (messages.size() > first + 1) {
    const std::vector<std::string> between = parts(fields, "assistant", 2);
    for (std::size_t i = first + 1; i < messages.size(); i += 2) {
      text += between[0] + content(messages[i]) + between[1] + content(messages[i + 1]);
    }
  }
  return text + around.back();
}

}  // namespace pi2::runner
