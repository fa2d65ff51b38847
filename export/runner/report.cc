#include "report.h"

#include <cstdio>

namespace pi2::runner {
namespace {

std::int64_t count(const Json& stats, const char* name) { return stats.value(name, std::int64_t{0}); }

// Sums of both stages; values that cannot be added are the current ones.
Json together(const Json& prompt, const Json& decode) {
  Json all = decode;
  for (const char* name : {"calls", "wanted", "hits", "reads", "bytes_read", "wait_ns", "busy_ns", "submit_wait_ns"}) {
    if (decode.contains(name)) all[name] = count(prompt, name) + count(decode, name);
  }
  return all;
}

// null if it could not be read.
Json known(std::int64_t bytes) { return bytes == 0 ? Json() : Json(bytes); }

Json share(std::int64_t part, std::int64_t of) {
  return of == 0 ? Json() : Json(static_cast<double>(part) / static_cast<double>(of));
}

double per_second(std::int64_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

// Tokens after the first of each answer, which belongs to the prompt.
std::int64_t decoded(const Run& run) {
  std::int64_t tokens = 0;
  for (const Answer& answer : run.generated.answers) tokens += std::ssize(answer.ids) - 1;
  return tokens;
}

}  // namespace

Json report(const Run& run) {
  const Generated& g = run.generated;
  const Json store = together(g.prompt_stats, g.decode_stats);
  const Memory& memory = run.memory;
  // Without a budget: the engine's cache size; null if it has no layer.
  const Json cache = run.options.budget >= 0 ? Json(run.cache_bytes) : store.value("cache_bytes", Json());
  Json sequences = Json::array();
  for (const Answer& answer : g.answers) {
    sequences.push_back({{"text", answer.text}, {"ids", answer.ids}, {"ended", answer.ended}});
  }
  return {
      {"bundle", run.options.bundle},
      {"target", run.manifest.target},
      {"prompt", run.options.prompt.empty() ? Json() : Json(run.options.prompt)},
      {"prompt_tokens", run.prompt_tokens},
      {"known_tokens", run.options.request.known},
      {"new_tokens", decoded(run) + std::ssize(g.answers)},
      {"sequences", sequences},
      {"tokens_per_second", per_second(decoded(run), g.decode_seconds)},
      {"prompt_tokens_per_second", per_second(run.prompt_tokens - run.options.request.known, g.prompt_seconds)},
      {"load_seconds", run.load_seconds},
      {"prompt_seconds", g.prompt_seconds},
      {"decode_seconds", g.decode_seconds},
      {"sampling_seconds", g.sampling_seconds},
      {"decode_steps", g.decode_steps},
      {"hit_rate", share(count(store, "hits"), count(store, "wanted"))},
      {"wait_share", share(count(store, "wait_ns"), count(store, "busy_ns"))},
      {"store", store},
      {"stages", {{"prompt", g.prompt_stats}, {"decode", g.decode_stats}}},
      {"memory",
       {{"budget_bytes", run.options.budget < 0 ? Json() : Json(run.options.budget)},
        {"cache_bytes", cache},
        {"resident_bytes", known(memory.resident)},
        {"peak_bytes", known(memory.peak)},
        {"anonymous_bytes", known(memory.anonymous)}}},
      {"threads", run.threads},
      {"cpus", report_of(run.cpus)},
      {"seed", run.options.request.seed},
      {"sampling",
       {{"temperature", run.options.request.sampling.temperature},
        {"top_k", run.options.request.sampling.top_k.value_or(0)},
        {"top_p", run.options.request.sampling.top_p.value_or(1)},
        {"min_p", run.options.request.sampling.min_p.value_or(0)},
        {"repetition_penalty", run.options.request.sampling.repetition_penalty.value_or(1)},
        {"stop", run.options.request.stop.value_or(std::vector<std::string>())}}},
      {"trace", run.options.trace.empty() ? Json() : Json(run.options.trace)},
  };
}

std::string summary(const Run& run) {
  const Json all = report(run);
  char text[256];
  std::snprintf(text, sizeof text, "[%lld tokens, %.1f tokens/s, prompt of %lld at %.1f tokens/s",
                static_cast<long long>(all["new_tokens"].get<std::int64_t>()), all["tokens_per_second"].get<double>(),
                static_cast<long long>(run.prompt_tokens), all["prompt_tokens_per_second"].get<double>());
  std::string line = text;
  if (run.memory.peak != 0) {
    std::snprintf(text, sizeof text, ", %.0f MiB at most", static_cast<double>(run.memory.peak) / 0x1p20);
    line += text;
  } else {
    line += ", memory not known: /proc/self/status cannot be read";
  }
  if (!all["hit_rate"].is_null()) {
    std::snprintf(text, sizeof text, ", %.1f %% of neurons in the cache", 100 * all["hit_rate"].get<double>());
    line += text;
  }
  if (!all["wait_share"].is_null()) {
    std::snprintf(text, sizeof text, ", %.1f %% of the time waiting for reads", 100 * all["wait_share"].get<double>());
    line += text;
  }
  return line + "]";
}

}  // namespace pi2::runner
