#include "bindings/executorch/settings.h"

#include <cstdlib>
#include <mutex>

#include "cache/neuron_cache.h"
#include "pi2/read_engine.h"

namespace pi2::et {
namespace {

constexpr const char* kKeys =
    "store_path, cache_bytes_kib, threads, io_threads, engine, policy, direct, preload or trace";
constexpr const char* kFix = "csrc/include/pi2/executorch.h says what they are.";

std::mutex mutex;

Options& of_process() {
  static auto* const all = new Options();  // never destroyed: programs may still be loaded while the process ends
  return *all;
}

Problem wrong(const std::string& key, const std::string& expected, const std::string& found) {
  return problem(Fault::kArgument, "option " + key + " of Pi2Backend", expected, "'" + found + "'", kFix);
}

Problem number(const std::string& key, const std::string& value, std::int64_t least, std::int64_t most,
               std::int64_t* out) {
  std::int64_t found = 0;
  bool digits = !value.empty() && value.size() <= 15;
  for (const char c : value) {
    digits = digits && c >= '0' && c <= '9';
    if (digits) found = 10 * found + (c - '0');
  }
  if (!digits || found < least || found > most)
    return wrong(key, std::to_string(least) + " to " + std::to_string(most), value);
  *out = found;
  return {};
}

Problem truth(const std::string& key, const std::string& value, bool* out) {
  const bool yes = value == "true" || value == "1";
  if (!yes && value != "false" && value != "0") return wrong(key, "true or false", value);
  *out = yes;
  return {};
}

}  // namespace

std::string Settings::text() const {
  std::string all;
  for (const std::int64_t n :
       {cache_bytes, std::int64_t{threads}, std::int64_t{io_threads}, std::int64_t{direct}, std::int64_t{preload}})
    all += std::to_string(n) + " ";
  return all + engine + " " + policy + " " + trace;
}

Problem change(Settings* settings, const std::string& key, const std::string& value) {
  if (key == "store_path") {
    settings->store_path = value;
  } else if (key == "cache_bytes_kib") {
    std::int64_t kib = 0;
    const Problem found = number(key, value, 0, std::int64_t{1} << 40, &kib);
    if (found) return found;
    settings->cache_bytes = kib * 1024;
  } else if (key == "threads" || key == "io_threads") {
    std::int64_t n = 0;
    const Problem found = number(key, value, key == "threads" ? 0 : 1, 1024, &n);
    if (found) return found;
    (key == "threads" ? settings->threads : settings->io_threads) = static_cast<int>(n);
  } else if (key == "engine") {
    if (value != "auto" && !is_read_engine(value)) return wrong(key, read_engine_choices("auto"), value);
    settings->engine = value;
  } else if (key == "policy") {
    CachePolicy policy;
    const std::string why = policy_of(value, &policy);
    if (!why.empty()) return {Fault::kArgument, "option policy of Pi2Backend: " + why + ". " + kFix};
    settings->policy = value;
  } else if (key == "direct") {
    return truth(key, value, &settings->direct);
  } else if (key == "preload") {
    return truth(key, value, &settings->preload);
  } else if (key == "trace") {
    settings->trace = value;
  } else {
    return problem(Fault::kArgument, "option of Pi2Backend", kKeys, "'" + key + "'", kFix);
  }
  return {};
}

Problem set_option(const std::string& key, const std::string& value) {
  Settings trial;
  // An empty value resets the key. Tries a value that every key with a default accepts: only the key can be wrong.
  const Problem found = value.empty() && (key != "store_path" && key != "trace")
                            ? change(&trial, key,
                                     key == "engine"                       ? trial.engine
                                     : key == "policy"                     ? trial.policy
                                     : key == "direct" || key == "preload" ? "true"
                                                                           : "1")
                            : change(&trial, key, value);
  if (found) return found;
  const std::lock_guard<std::mutex> lock(mutex);
  if (value.empty())
    of_process().erase(key);
  else
    of_process()[key] = value;
  return {};
}

Problem current_settings(const Options& options, Settings* settings) {
  *settings = Settings();
  Options merged;
  const std::pair<const char*, const char*> environment[] = {{"store_path", "PI2_STORE"},
                                                             {"cache_bytes_kib", "PI2_CACHE_KIB"}};
  for (const auto& [key, name] : environment) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == 0) continue;
    Settings trial;
    const Problem found = change(&trial, key, value);
    if (found) return {found.fault, std::string(name) + ": " + found.text};
    merged[key] = value;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [key, value] : of_process()) merged[key] = value;
  }
  for (const auto& [key, value] : options) merged[key] = value;
  for (const auto& [key, value] : merged) {
    const Problem found = change(settings, key, value);
    if (found) return found;
  }
  return {};
}

}  // namespace pi2::et
