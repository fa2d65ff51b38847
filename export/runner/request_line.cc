#include "request_line.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>

#include "generation_config.h"

namespace pi2::runner {
namespace {

constexpr const char* kFix = kCorrectRequest;
constexpr std::array<std::string_view, 18> kNames{"id",
                                                  "prompt",
                                                  "prompts",
                                                  "ids",
                                                  "messages",
                                                  "system",
                                                  "chat",
                                                  "stop",
                                                  "seed",
                                                  "stream",
                                                  "reuse",
                                                  "temperature",
                                                  "top_k",
                                                  "top_p",
                                                  "min_p",
                                                  "repetition_penalty",
                                                  "num_return_sequences",
                                                  "max_new_tokens"};

std::vector<Message> messages_of(const Json& list) {
  std::vector<Message> messages;
  for (const Json& one : list) {
    const Fields fields(one, "request, messages", kFix);
    messages.push_back({fields.text("role"), fields.text("content")});
  }
  return messages;
}

}  // namespace

Json parse_request(std::string_view text) { return parse_json(text, "request", kFix, 1 << 18); }

Options request_of(const Json& line, const Options& base) {
  const Fields fields(line, "request", kFix);
  for (const auto& [name, value] : line.items()) {
    if (std::find(kNames.begin(), kNames.end(), name) == kNames.end()) {
      throw Problem("request", "fields that docs/BUNDLE.md has", printable(name, 80), kFix);
    }
  }
  if (fields.has("prompt") + fields.has("prompts") + fields.has("ids") + fields.has("messages") != 1) {
    throw Problem("request", "prompt, prompts, ids or messages", "none or several of them", kFix);
  }
  Options o = base;
  o.goes_on = fields.flag("reuse", fields.has("messages"));
  o.streams = fields.flag("stream", false);
  o.chat = fields.flag("chat", base.chat && fields.has("prompt"));
  if (o.chat && !fields.has("prompt")) throw Problem("request, chat", "prompt beside it", "none", kFix);
  if (fields.has("prompt")) o.prompt = fields.text("prompt");
  if (fields.has("prompts")) {
    o.prompts = fields.texts("prompts");
    for (const char* name : {"reuse", "num_return_sequences"}) {
      if (fields.has(name)) throw Problem("request, prompts", std::string("no ") + name + " beside it", "both", kFix);
    }
    if (o.prompts.empty()) throw Problem("request, prompts", "one or more", "none", kFix);
  }
  if (fields.has("ids")) o.request.prompt = fields.numbers("ids");
  if (fields.has("messages")) {
    o.messages = messages_of(fields.list("messages"));
    if (o.messages.empty()) throw Problem("request, messages", "one or more", "none", kFix);
    o.chat = true;
  }
  if (fields.has("system")) {
    if (!o.chat || !fields.has("prompt")) throw Problem("request, system", "chat and prompt beside it", "none", kFix);
    o.system = fields.text("system");
    o.empty_system = o.system.empty();
  }
  Request& request = o.request;
  if (fields.has("temperature")) request.sampling.temperature = fields.real("temperature");
  read_sampling(fields, request.sampling);
  if (fields.has("stop")) request.stop = fields.texts("stop");
  if (fields.has("seed")) request.seed = static_cast<std::uint64_t>(fields.number("seed"));
  if (fields.has("max_new_tokens")) {
    request.max_new_tokens = fields.number("max_new_tokens");
    if (request.max_new_tokens == 0) throw Problem("request, max_new_tokens", "1 or more", "0", kFix);
  }
  if (fields.has("num_return_sequences")) {
    const std::int64_t most = std::numeric_limits<int>::max();
    request.sequences = static_cast<int>(std::min(fields.number("num_return_sequences"), most));
  }
  return o;
}

}  // namespace pi2::runner
