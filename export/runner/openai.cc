#include "openai.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <utility>

#include "request_line.h"

namespace pi2::runner {
namespace {

constexpr const char* kFix = kCorrectRequest;

// Unsupported fields that would change the answer, and their values (besides null) that request nothing.
constexpr std::pair<const char*, const char*> kNotDone[] = {{"audio", "[]"},
                                                            {"echo", "[false]"},
                                                            {"frequency_penalty", "[0]"},
                                                            {"function_call", R"(["none", "auto"])"},
                                                            {"functions", "[[]]"},
                                                            {"logit_bias", "[{}]"},
                                                            {"logprobs", "[false]"},
                                                            {"modalities", R"([["text"]])"},
                                                            {"moderation", "[]"},
                                                            {"presence_penalty", "[0]"},
                                                            {"reasoning_effort", "[]"},
                                                            {"response_format", R"([{"type": "text"}])"},
                                                            {"suffix", R"([""])"},
                                                            {"tool_choice", R"(["none", "auto"])"},
                                                            {"tools", "[[]]"},
                                                            {"top_logprobs", "[0]"},
                                                            {"verbosity", R"(["medium"])"},
                                                            {"web_search_options", "[]"}};

void check_not_done(const Fields& fields) {
  for (const auto& [name, nothing] : kNotDone) {
    if (!fields.has(name)) continue;
    const Json& value = fields.data()[name];
    const Json known = Json::parse(nothing);
    if (std::find(known.begin(), known.end(), value) == known.end()) {
      throw Problem(fields.where() + ", " + name, "none: this is not supported", shown(value), "Leave it out.");
    }
  }
}

// A text, or a list of text parts.
std::string content_of(const Fields& message) {
  if (!message.has("content") || !message.data()["content"].is_array()) return message.text("content");
  std::string text;
  for (const Json& one : message.list("content")) {
    const Fields part(one, message.where() + ", content", kFix);
    if (part.text("type") != "text") {
      throw Problem(part.where(), "parts of type text", printable(part.text("type"), 40), "Leave the others out.");
    }
    text += part.text("text");
  }
  return text;
}

Json messages_of(const Fields& fields) {
  Json made = Json::array();
  for (const Json& one : fields.list("messages")) {
    const Fields message(one, fields.where() + ", messages", kFix);
    if (message.has("tool_calls") && !message.list("tool_calls").empty()) {
      throw Problem(message.where() + ", tool_calls", "none: tools are not supported", "some", "Leave them out.");
    }
    const std::string& role = message.text("role");
    made.push_back({{"role", role == "developer" ? "system" : role}, {"content", content_of(message)}});
  }
  return made;
}

// A text, token ids, or several texts.
void add_prompt(const Fields& fields, Json& line) {
  const Json& prompt = fields.has("prompt") ? fields.data()["prompt"] : Json();
  const auto all = [&](bool (*fits)(const Json&)) {
    return prompt.is_array() && !prompt.empty() && std::all_of(prompt.begin(), prompt.end(), fits);
  };
  if (prompt.is_string()) {
    line["prompt"] = prompt;
  } else if (all([](const Json& v) { return v.is_number(); })) {
    (void)fields.numbers("prompt");
    line["ids"] = prompt;
  } else if (all([](const Json& v) { return v.is_string(); })) {
    line[prompt.size() == 1 ? "prompt" : "prompts"] = prompt.size() == 1 ? prompt[0] : prompt;
  } else {
    throw Problem(fields.where() + ", prompt", "a text, token ids, or a list of texts", shown(prompt), kFix);
  }
}

const char* reason(const Answer& answer) { return answer.ended == "eos" || answer.ended == "stop" ? "stop" : "length"; }

Json usage_of(const Run& run) {
  std::int64_t answered = 0;
  for (const Answer& answer : run.generated.answers) answered += std::ssize(answer.ids);
  return {{"prompt_tokens", run.prompt_tokens},
          {"completion_tokens", answered},
          {"total_tokens", run.prompt_tokens + answered},
          {"prompt_tokens_details", {{"cached_tokens", run.options.request.known}}}};
}

}  // namespace

Asked asked_of(const std::string& body, bool chat, int lanes) {
  const Json json = parse_request(body);
  const Fields fields(json, "request", kFix);
  check_not_done(fields);
  Asked asked;
  asked.chat = chat;
  if (fields.has("model")) asked.model = fields.text("model");
  Json& line = asked.line;
  line = Json::object();
  if (chat) {
    line["messages"] = messages_of(fields);
  } else {
    add_prompt(fields, line);
  }
  for (const char* name : {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "seed", "stream"}) {
    if (fields.has(name)) line[name] = json[name];
  }
  for (const char* name : {"max_tokens", "max_completion_tokens"}) {
    if (!fields.has(name)) continue;
    if (fields.number(name) == 0) throw Problem(fields.where() + ", " + name, "1 or more", "0", kFix);
    line["max_new_tokens"] = json[name];
  }
  const std::int64_t choices = fields.has("n") ? fields.number("n") : 1;
  if (fields.has("best_of") && fields.number("best_of") != choices) {
    throw Problem(fields.where() + ", best_of", "none, or n: this is not supported", shown(json["best_of"]), kFix);
  }
  const std::size_t texts = chat || !line.contains("prompts") ? 1 : line["prompts"].size();
  if (texts > static_cast<std::size_t>(lanes)) {
    throw Problem(fields.where() + ", prompt", "at most " + std::to_string(lanes) + " texts, the lanes of the bundle",
                  std::to_string(texts), kFix);
  }
  if (choices < 1 || choices > (texts > 1 ? 1 : lanes)) {
    throw Problem(
        fields.where() + ", n",
        texts > 1 ? "1, as prompt has several texts" : "1 to " + std::to_string(lanes) + ", the lanes of the bundle",
        shown(json["n"]), kFix);
  }
  if (choices != 1) line["num_return_sequences"] = json["n"];
  if (fields.has("stream_options")) {
    if (!fields.flag("stream", false)) {
      throw Problem(fields.where() + ", stream_options", "stream beside it", "none", kFix);
    }
    asked.usage = fields.sub("stream_options").flag("include_usage", false);
  }
  return asked;
}

OpenAiAnswer::OpenAiAnswer(const Asked& asked, std::string model, std::int64_t number)
    : chat_(asked.chat), model_(std::move(model)), created_(std::time(nullptr)) {
  char id[64];
  std::snprintf(id, sizeof id, "%s-%llx-%llx", chat_ ? "chatcmpl" : "cmpl", static_cast<unsigned long long>(created_),
                static_cast<unsigned long long>(number));
  id_ = id;
}

Json OpenAiAnswer::with(const char* object, Json choices) const {
  return {{"id", id_}, {"object", object}, {"created", created_}, {"model", model_}, {"choices", std::move(choices)}};
}

Json OpenAiAnswer::whole(const Run& run) const {
  Json choices = Json::array();
  for (const Answer& answer : run.generated.answers) {
    Json choice = {{"index", choices.size()}, {"logprobs", Json()}, {"finish_reason", reason(answer)}};
    if (chat_) {
      choice["message"] = {{"role", "assistant"}, {"content", answer.text}, {"refusal", Json()}};
    } else {
      choice["text"] = answer.text;
    }
    choices.push_back(std::move(choice));
  }
  Json made = with(chat_ ? "chat.completion" : "text_completion", std::move(choices));
  made["usage"] = usage_of(run);
  return made;
}

Json OpenAiAnswer::chunk(int choice, Json said, Json why) const {
  Json one = {{"index", choice}, {"logprobs", Json()}, {"finish_reason", std::move(why)}};
  one[chat_ ? "delta" : "text"] = std::move(said);
  return with(chat_ ? "chat.completion.chunk" : "text_completion", Json::array({std::move(one)}));
}

Json OpenAiAnswer::role(int choice) const {
  return chunk(choice, {{"role", "assistant"}, {"content", ""}, {"refusal", Json()}}, Json());
}

Json OpenAiAnswer::piece(int choice, const std::string& text) const {
  return chunk(choice, chat_ ? Json{{"content", text}} : Json(text), Json());
}

Json OpenAiAnswer::last(int choice, const Answer& answer) const {
  return chunk(choice, chat_ ? Json::object() : Json(""), reason(answer));
}

Json OpenAiAnswer::usage(const Run& run) const {
  Json made = with(chat_ ? "chat.completion.chunk" : "text_completion", Json::array());
  made["usage"] = usage_of(run);
  return made;
}

}  // namespace pi2::runner
