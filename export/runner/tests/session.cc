// pi2_session_test: several sessions in a process, as an app uses them. For every line of JSON from standard input, a
// line:
//   {"open": "a", "bundle": PATH, "budget": n, "threads": n, "trace": PATH}
//   {"generate": "a", "ids": [...], ...}      the report, or {"error": message}; numbers as in Request
//   {"close": "a"}
#include <iostream>
#include <map>

#include "session.h"

namespace pi2::runner {
namespace {

double number(const Json& json, const char* name, double otherwise) {
  if (!json.contains(name)) return otherwise;
  return json[name].is_string() ? std::stod(json[name].get<std::string>()) : json[name].get<double>();  // "nan"
}

Json answer(const Json& given, std::map<std::string, std::pair<Options, std::unique_ptr<Session>>>& open) {
  if (given.contains("open")) {
    Options o;
    o.bundle = given.at("bundle");
    o.budget = given.value("budget", std::int64_t{-1});
    o.threads = given.value("threads", 0);
    o.trace = given.value("trace", "");
    o.request.prompt = {1};  // no tokenizer is needed
    open[given.at("open")] = {o, std::make_unique<Session>(o)};
    return Json::object();
  }
  if (given.contains("close")) {
    const auto node = open.extract(given.at("close").get<std::string>());
    node.mapped().second->close();
    return Json::object();
  }
  const auto& [options, session] = open.at(given.at("generate"));
  Options o = options;
  o.request.prompt = given.at("ids").get<std::vector<std::int64_t>>();
  o.request.max_new_tokens = given.value("max_new_tokens", std::int64_t{0});
  o.request.sampling.temperature = number(given, "temperature", 0);
  o.request.sampling.top_p = number(given, "top_p", 1);
  o.request.sequences = given.value("sequences", 1);
  return report(session->generate(o, {}));
}

}  // namespace
}  // namespace pi2::runner

int main() {
  std::map<std::string, std::pair<pi2::runner::Options, std::unique_ptr<pi2::runner::Session>>> open;
  for (std::string line; std::getline(std::cin, line);) {
    pi2::runner::Json found;
    try {
      found = pi2::runner::answer(pi2::runner::Json::parse(line), open);
    } catch (const pi2::runner::Problem& problem) {
      found = {{"error", problem.what()}};
    }
    std::cout << found.dump() << std::endl;
  }
  return 0;
}
