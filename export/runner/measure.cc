#include "measure.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <vector>

#include "interrupts.h"

namespace pi2::runner {
namespace {

namespace fs = std::filesystem;

// Nearest rank.
double percentile(const std::vector<double>& sorted, double share) {
  const auto rank = static_cast<std::size_t>(share * static_cast<double>(sorted.size() - 1) + 0.5);
  return sorted[rank];
}

Json spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {{"median", percentile(values, 0.5)},
          {"p10", percentile(values, 0.1)},
          {"p90", percentile(values, 0.9)},
          {"min", values.front()},
          {"max", values.back()}};
}

// The first line of a file; "" if it cannot be read.
std::string first_line(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

// For each entry of `folder`: the number in its `file` times `scale`, keyed by its `name`.
Json read_all(const fs::path& folder, const std::string& prefix, const char* name, const char* file, double scale) {
  Json found = Json::object();
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string own = entry.path().filename().string();
    const std::string number = first_line(entry.path() / file);
    if (!own.starts_with(prefix) || number.empty()) continue;
    const std::string called = name == nullptr ? "" : " " + first_line(entry.path() / name);
    found[own + called] = std::atof(number.c_str()) * scale;
  }
  return found;
}

// Degrees Celsius by thermal zone and percent by battery, where available.
Json conditions() {
  const fs::path sys = "/sys";
  return {{"celsius", read_all(sys / "class/thermal", "thermal_zone", "type", "temp", 1e-3)},
          {"battery_percent", read_all(sys / "class/power_supply", "", nullptr, "capacity", 1)}};
}

}  // namespace

Json measure(Session& session, const Options& o) {
  std::vector<double> prompts, tokens;
  Json last;
  const Json before = conditions();
  for (int round = -o.warm_up; round < o.repeat; ++round) {
    Json said;
    try {
      said = report(session.generate(o, Stream()));
    } catch (const Problem&) {
      if (interrupted() == 0) throw;  // otherwise a signal ended it during the prompt
    }
    if (interrupted() != 0) break;
    if (round < 0) continue;
    prompts.push_back(said["prompt_tokens_per_second"].get<double>());
    tokens.push_back(said["tokens_per_second"].get<double>());
    last = std::move(said);
  }
  if (prompts.empty()) throw Problem("interrupted");
  Json found = {{"rounds", prompts.size()},
                {"warm_up", o.warm_up},
                {"prompt_tokens_per_second", spread(prompts)},
                {"tokens_per_second", spread(tokens)},
                {"before", before},
                {"after", conditions()}};
  for (const char* same :
       {"bundle", "target", "prompt_tokens", "new_tokens", "load_seconds", "memory", "threads", "cpus"}) {
    found[same] = last[same];
  }
  return found;
}

std::string measured_text(const Json& found) {
  std::string text;
  char line[256];
  std::snprintf(line, sizeof line, "%d rounds, %lld tokens after %lld, %d threads\n", found["rounds"].get<int>(),
                static_cast<long long>(found["new_tokens"].get<std::int64_t>()),
                static_cast<long long>(found["prompt_tokens"].get<std::int64_t>()), found["threads"].get<int>());
  text += line;
  for (const auto& [name, what] :
       {std::pair("prompt_tokens_per_second", "prompt"), {"tokens_per_second", "decoding"}}) {
    const Json& rates = found[name];
    const auto at = [&rates](const char* which) { return rates[which].get<double>(); };
    std::snprintf(line, sizeof line,
                  "%-9s %8.1f tokens/s (median; %.1f to %.1f from the 10th to the 90th percentile)\n", what,
                  at("median"), at("p10"), at("p90"));
    text += line;
  }
  for (const auto& [zone, celsius] : found["before"]["celsius"].items()) {
    if (!found["after"]["celsius"].contains(zone)) continue;
    std::snprintf(line, sizeof line, "%s: %.1f to %.1f degrees Celsius\n", printable(zone, 60).c_str(),
                  celsius.get<double>(), found["after"]["celsius"][zone].get<double>());
    text += line;
  }
  return text;
}

}  // namespace pi2::runner
