#include "serve.h"

#include <arpa/inet.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <string_view>
#include <utility>

#include "openai.h"
#include "request_line.h"
#include "tokenizer/utf8.h"

namespace pi2::runner {
namespace {

constexpr const char *kChat = "/v1/chat/completions", *kCompletions = "/v1/completions", *kModels = "/v1/models";

// The folder's name.
std::string name_of(const std::string& bundle) {
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::weakly_canonical(bundle, error);
  return repaired(folder.filename().string());
}

// Whether the Host header names this machine. A page of another site whose name resolves to it (DNS rebinding) sends
// that name; addresses are safe.
bool is_ours(const std::string& header, const HttpServer& server) {
  std::string host = header;
  if (host.starts_with('[')) {
    host = host.substr(1, std::min(host.find(']'), host.size()) - 1);
  } else {
    host.resize(std::min(host.find(':'), host.size()));
  }
  unsigned char bytes[16];
  return host.empty() || host == "localhost" || host == server.host() || inet_pton(AF_INET, host.c_str(), bytes) == 1 ||
         inet_pton(AF_INET6, host.c_str(), bytes) == 1;
}

// Decodes percent escapes in a path (%C3%A9).
std::string unescaped(std::string_view text) {
  std::string plain;
  for (std::size_t at = 0; at < text.size(); ++at) {
    unsigned byte = 0;
    const char* const digits = text.data() + at + 1;
    const bool escaped =
        text[at] == '%' && text.size() - at > 2 && std::from_chars(digits, digits + 2, byte, 16).ptr == digits + 2;
    plain += escaped ? static_cast<char>(byte) : text[at];
    if (escaped) at += 2;
  }
  return plain;
}

Reply allowed(const HttpRequest& request, const std::string& methods) {
  Reply reply = refusal(405, "method: expected " + methods + ", found " + request.method + ". Correct the request.");
  reply.header = "Allow: " + methods;
  return reply;
}

Reply no_model(const std::string& name, const std::string& asked) {
  return refusal(404, "model: expected " + name + ", found " + printable(asked, 80) + ". Name the one that is there.",
                 "model_not_found");
}

// Answers everything that does not need the model.
std::optional<Reply> at_once(const HttpRequest& request, const HttpServer& server, const std::string& name,
                             std::int64_t created) {
  const std::string& path = request.path;
  const bool posts = path == kChat || path == kCompletions, model = path.starts_with(std::string(kModels) + "/");
  if (!is_ours(request.host, server)) {
    return refusal(403, "host: expected localhost or an address, found " + printable(request.host, 80) +
                            ". Name the address that the runner listens on.");
  }
  if (posts) {
    if (request.method != "POST") return allowed(request, "POST");
    // Browsers do not let a page send this type to another site without a preflight request.
    if (request.content_type.starts_with("application/json")) return std::nullopt;
    return refusal(415, "content-type: expected application/json, found " +
                            (request.content_type.empty() ? "none" : printable(request.content_type, 80)) +
                            ". Send the header.");
  }
  if (path != "/health" && path != kModels && !model) {
    return refusal(404, "path: expected /v1/chat/completions, /v1/completions, /v1/models or /health, found " +
                            printable(path, 80) + ". Correct the address.");
  }
  if (request.method != "GET" && request.method != "HEAD") return allowed(request, "GET, HEAD");
  if (path == "/health") return Reply{200, line_of({{"status", "ok"}})};
  const Json about = {{"id", name}, {"object", "model"}, {"created", created}, {"owned_by", "torch_pi2"}};
  if (path == kModels) return Reply{200, line_of({{"object", "list"}, {"data", Json::array({about})}})};
  const std::string asked = unescaped(std::string_view(path).substr(std::string_view(kModels).size() + 1));
  return asked == name ? Reply{200, line_of(about)} : no_model(name, asked);
}

// JSON on one line, without a line end.
std::string text_of(const Json& json) {
  std::string text = line_of(json);
  text.pop_back();
  return text;
}

class Served {
 public:
  Served(Session& session, const Options& o, std::string name) : session_(session), base_(o), name_(std::move(name)) {}

  void answer(Exchange& exchange) {
    exchange_ = &exchange;
    path_ = exchange.request().path;
    try {
      answer(asked_of(exchange.request().body, path_ == kChat, session_.lanes()));
    } catch (const NoRoom& problem) {
      refuse(refusal(400, problem.what(), "context_length_exceeded"), problem.what());
    } catch (const RunError& problem) {
      refuse(refusal(500, problem.what()), problem.what());
    } catch (const Problem& problem) {
      refuse(stopped() ? refusal(503, kServerEnds, "server_ends") : refusal(400, problem.what()), problem.what());
    }
  }

 private:
  bool stopped() const { return interrupted() != 0 || exchange_->gone(); }

  void answer(const Asked& asked) {
    if (!asked.model.empty() && asked.model != name_) {
      exchange_->answer(no_model(name_, asked.model));
      return;
    }
    Options o = request_of(asked.line, base_);
    if (!asked.line.contains("seed")) o.request.seed += static_cast<std::uint64_t>(number_);
    o.request.stopped = [this] { return stopped(); };
    const OpenAiAnswer says(asked, name_, number_++);
    const auto event = [this](const Json& json) { exchange_->event(text_of(json)); };
    const auto begin = [&] {
      for (int i = 0; asked.chat && !exchange_->begun() && i < answers(o.request); ++i) event(says.role(i));
    };
    const auto stream = [&](int choice, const std::string& text) {
      begin();
      event(says.piece(choice, text));
    };
    const Run run = session_.generate(o, o.streams ? Stream(stream) : Stream());
    if (stopped()) throw Problem("interrupted");
    if (o.streams) {
      begin();
      int choice = 0;
      for (const Answer& answer : run.generated.answers) event(says.last(choice++, answer));
      if (asked.usage) event(says.usage(run));
      exchange_->event("[DONE]");
      exchange_->end();
    } else {
      exchange_->answer({200, line_of(says.whole(run))});
    }
    log(summary(run));
  }

  // Ends an answer that has started.
  void refuse(const Reply& reply, const std::string& why) {
    log(exchange_->gone() ? "the client has gone" : why);
    if (!exchange_->begun()) return exchange_->answer(reply);
    exchange_->event(text_of(Json::parse(reply.body)));
    exchange_->end();
  }

  void log(const std::string& what) const { std::fprintf(stderr, "%s: %s\n", path_.c_str(), what.c_str()); }

  Session& session_;
  const Options& base_;
  const std::string name_;
  Exchange* exchange_ = nullptr;  // the current one, and its path
  std::string path_;
  std::int64_t number_ = 0;  // answered requests
};

}  // namespace

void serve_http(Session& session, const Options& o, HttpServer& server,
                const std::function<void(const std::string&)>& ready) {
  const std::string name = name_of(o.bundle);
  const std::int64_t created = std::time(nullptr);
  if (!server.is_local()) {
    std::fprintf(stderr, "warning: whoever reaches %s can ask the model: it knows no passwords.\n",
                 server.url().c_str());
  }
  server.start([&, name, created](const HttpRequest& request) { return at_once(request, server, name, created); });
  session.bind_readers();  // the server's thread
  ready(server.url() + "/v1, model " + name + "\n");
  Served served(session, o, name);
  while (wait_for_input(server.waits())) {
    while (interrupted() == 0) {
      const std::unique_ptr<Exchange> exchange = server.next();
      if (exchange == nullptr) break;
      served.answer(*exchange);
    }
  }
}

}  // namespace pi2::runner
