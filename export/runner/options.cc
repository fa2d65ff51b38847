#include "options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <utility>

#include "io/output_file.h"

namespace pi2::runner {
namespace {

constexpr const char* kFix = "Correct it; --help lists the options.";

// Parses all of `text` as a number within [low, high].
template <class T>
T number(const std::string& name, const std::string& text, T low, T high, const std::string& expected) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= low && value <= high)) {
    throw Problem(name, expected, "'" + text + "'", kFix);
  }
  return value;
}

// The decimal number at the start of `text` and its length; 0: none. std::from_chars for double is missing in the NDK's
// C++ library. Only characters of such numbers reach strtod, and no locale is set.
std::pair<double, std::size_t> leading_double(const std::string& text) {
  const std::size_t most = std::min(text.find_first_not_of("0123456789.eE+-"), text.size());
  const std::string part = text.substr(0, most);
  char* end = nullptr;
  const double value = part.starts_with('+') ? 0 : std::strtod(part.c_str(), &end);
  return {value, end == nullptr ? 0 : static_cast<std::size_t>(end - part.c_str())};
}

double real(const std::string& name, const std::string& text, const std::string& expected) {
  const auto [value, bytes] = leading_double(text);
  if (bytes == 0 || bytes != text.size() || !std::isfinite(value))
    throw Problem(name, expected, "'" + text + "'", kFix);
  return value;
}

std::int64_t positive(const std::string& name, const std::string& text) {
  return number<std::int64_t>(name, text, 1, std::numeric_limits<int>::max(), "a whole number, 1 or more");
}

std::vector<std::int64_t> token_ids(const std::string& text) {
  std::vector<std::int64_t> ids;
  for (std::size_t at = 0, end = 0; end != std::string::npos; at = end + 1) {
    end = text.find(',', at);
    const std::string part = text.substr(at, end == std::string::npos ? end : end - at);
    ids.push_back(number<std::int64_t>("--ids", part, 0, std::numeric_limits<int>::max(), "token ids such as 1,2,3"));
  }
  return ids;
}

// Two outputs to one file would overwrite each other.
void check_files(const Options& o) {
  std::map<std::string, std::string> names;
  const std::pair<const char*, const std::string&> given[] = {
      {"--trace", o.trace}, {"--etdump", o.etdump}, {"--logits", o.logits}};
  for (const auto& [option, file] : given) {
    if (file.empty()) continue;
    const std::string place = output_place(file);
    const auto [first, fresh] = names.emplace(place, option);
    if (fresh || place.empty() || std::filesystem::is_character_file(place)) continue;
    if (place == "-") throw Problem("arguments", "one file on standard output", "several", kFix);
    throw Problem(option, "a file of its own", file + ", which " + first->second + " writes", kFix);
  }
}

// Refuses options for a single prompt together with several prompts.
void check_several(const Options& o, bool prompt) {
  const char* name = !o.http.empty() ? "--http" : o.talks ? "--chat without --prompt" : "--requests";
  const std::pair<const char*, bool> others[] = {
      {"--prompt or --ids", prompt},
      {"--logits", !o.logits.empty()},
      {"--etdump", !o.etdump.empty()},
      {"--repeat", o.repeat > 0},
      {"--requests", !o.http.empty() && !o.requests.empty()},
      {"--chat", !o.http.empty() && o.chat},
      {"--json", o.requests.empty() && o.json},
      {"--num-return-sequences", o.requests.empty() && o.request.sequences > 1}};
  for (const auto& [other, given] : others) {
    if (given) throw Problem(name, "it without " + std::string(other), "both", kFix);
  }
}

}  // namespace

const char* const kUsage = R"(usage: pi2_runner BUNDLE --prompt TEXT [options]

Generates text with a bundle that torch_pi2.export wrote.

  --prompt TEXT            text to continue
  --ids N,...              token ids to continue, instead; needs no tokenizer
  --chat                   --prompt is what a user says: the model's chat template goes around it; without --prompt a
                           talk: every line of standard input is what the user says next
  --system TEXT            with --chat: what the system says first
  --max-new-tokens N       of each answer (64)
  --temperature T          0, the default, is greedy
  --top-k K, --top-p P, --min-p P
                           draw from the K most probable tokens (0: all), from those that make up P (1), from those at
                           least P times as probable as the first (0)
  --repetition-penalty R   of tokens that were there before; 1: none
  --stop TEXT              answers end before it; may be repeated
                           These, but not the temperature, are as the model's generation_config.json has them unless
                           they are given.
  --seed S                 of the first answer; the next has S + 1 (0)
  --num-return-sequences N answers to one prompt (1)
  --requests FILE          answer JSON objects, a line each, with a line each; -: of standard input (docs/BUNDLE.md)
  --http [HOST:]PORT       answer OpenAI's chat completions and completions, for programs of this machine (127.0.0.1;
                           docs/BUNDLE.md); answers are as long as there is room unless a request or --max-new-tokens says
  --repeat N               measure: the same prompt N times, and --warm-up times (1) before; medians and percentiles

  --budget BYTES           memory of the whole process, such as 2GB or 1.5GiB (default: as it takes)
  --threads N              for all computing
  --store PATH             the neuron store, or its folder, if it is not in BUNDLE
  --cpus auto              compute on the big cores and read on the little ones; if all are equal, bind nothing
  --cpus LIST              all on these CPUs, such as 4-7; --compute-cpus LIST, --read-cpus LIST: what computes, what reads
  --io-threads N           that read the store
  --engine NAME            that reads the store (default: auto); a wrong name lists them
  --policy NAME            of the neuron cache (default: lfu); a wrong name lists them
  --backend LIBRARY        load it first (ExecuTorch's QNN backend, for a bundle of such a target); may be repeated
  --verify                 compare the SHA-256 of all files first; without, the CRC32C of all but the neurons, which
                           are compared when they are read
  --no-verify              compare sizes alone: what is damaged may answer something else, or end the program

  --json                   one JSON object instead of text
  --trace FILE             what threads did, for Perfetto
  --etdump FILE            events of every operator, for ExecuTorch's Inspector
  --logits FILE            float32 [tokens, answers, vocabulary], for NumPy
                           One FILE may be -, standard output; text then goes to standard error.

Errors: one line on standard error, exit code 2. Ctrl-C ends an answer behind the next token, and the program when what
it was to write is written; a second one at once.
)";

std::int64_t parse_bytes(const std::string& text) {
  const auto [value, bytes] = leading_double(text);
  const std::string unit = text.substr(bytes);
  double scale = 0;
  if (unit.empty() || unit == "B") scale = 1;
  for (int i = 0; i < 4 && scale == 0; ++i) {
    const std::string prefix(1, "KMGT"[i]);
    if (unit == prefix || unit == prefix + "B") scale = std::pow(1000.0, i + 1);
    if (unit == prefix + "i" || unit == prefix + "iB") scale = std::pow(1024.0, i + 1);
  }
  if (bytes == 0 || scale == 0 || !(value >= 0 && value * scale < 0x1p62)) {
    throw Problem("--budget", "bytes, or text such as 2.5GiB or 700MB", "'" + text + "'", kFix);
  }
  return static_cast<std::int64_t>(value * scale);
}

Options parse_options(int argc, char** argv) {
  Options o;
  o.request.max_new_tokens = 64;
  Sampling& sampling = o.request.sampling;
  bool prompt = false, ids = false, system = false, hashes = false, sizes = false, warm_up = false, length = false;
  using Take = std::function<void(const std::string&)>;
  const auto text = [](std::string& to) { return Take([&to](const std::string& v) { to = v; }); };
  const std::map<std::string, Take> with_value = {
      {"--prompt", [&](const auto& v) { o.prompt = v, prompt = true; }},
      {"--ids", [&](const auto& v) { o.request.prompt = token_ids(v), ids = true; }},
      {"--system", [&](const auto& v) { o.system = v, system = true, o.empty_system = v.empty(); }},
      {"--max-new-tokens",
       [&](const auto& v) { o.request.max_new_tokens = positive("--max-new-tokens", v), length = true; }},
      {"--temperature", [&](const auto& v) { sampling.temperature = real("--temperature", v, "0 (greedy) or more"); }},
      {"--top-p", [&](const auto& v) { sampling.top_p = real("--top-p", v, "more than 0, at most 1"); }},
      {"--min-p", [&](const auto& v) { sampling.min_p = real("--min-p", v, "0 to 1"); }},
      {"--repetition-penalty",
       [&](const auto& v) { sampling.repetition_penalty = real("--repetition-penalty", v, "0.01 to 100; 1 is none"); }},
      {"--top-k",
       [&](const auto& v) {
         sampling.top_k = number<std::int64_t>("--top-k", v, 0, std::numeric_limits<int>::max(), "0 (all) or more");
       }},
      {"--stop",
       [&](const auto& v) {
         if (!o.request.stop) o.request.stop.emplace();
         o.request.stop->push_back(v);
       }},
      {"--requests", text(o.requests)},
      {"--http", text(o.http)},
      {"--repeat", [&](const auto& v) { o.repeat = static_cast<int>(positive("--repeat", v)); }},
      {"--warm-up",
       [&](const auto& v) {
         o.warm_up = static_cast<int>(number<std::int64_t>("--warm-up", v, 0, 1000, "a whole number, 0 to 1000"));
         warm_up = true;
       }},
      {"--seed",
       [&](const auto& v) {
         o.request.seed = number<std::uint64_t>("--seed", v, 0, std::numeric_limits<std::uint64_t>::max(),
                                                "a whole number, 0 or more");
       }},
      {"--num-return-sequences",
       [&](const auto& v) { o.request.sequences = static_cast<int>(positive("--num-return-sequences", v)); }},
      {"--budget", [&](const auto& v) { o.budget = parse_bytes(v); }},
      {"--threads",
       [&](const auto& v) {
         o.threads = static_cast<int>(number<std::int64_t>("--threads", v, 1, 1024, "a whole number, 1 to 1024"));
       }},
      {"--cpus", text(o.cpus)},
      {"--compute-cpus", text(o.compute_cpus)},
      {"--read-cpus", text(o.read_cpus)},
      {"--io-threads", text(o.io_threads)},
      {"--engine", text(o.engine)},
      {"--policy", text(o.policy)},
      {"--store", text(o.store)},
      {"--backend", [&](const auto& v) { o.backends.push_back(v); }},
      {"--trace", text(o.trace)},
      {"--etdump", text(o.etdump)},
      {"--logits", text(o.logits)},
  };
  const std::map<std::string, bool*> flags = {{"--chat", &o.chat},     {"--json", &o.json}, {"--verify", &hashes},
                                              {"--no-verify", &sizes}, {"--help", &o.help}, {"-h", &o.help}};
  for (int i = 1; i < argc; ++i) {
    std::string name = argv[i];
    if (const auto flag = flags.find(name); flag != flags.end()) {
      *flag->second = true;
      continue;
    }
    if (!name.starts_with("--")) {
      if (!o.bundle.empty()) throw Problem("arguments", "one bundle", "'" + o.bundle + "' and '" + name + "'", kFix);
      o.bundle = name;
      continue;
    }
    const std::size_t equals = name.find('=');
    std::string value = equals == std::string::npos ? "" : name.substr(equals + 1);
    name = name.substr(0, equals);
    const auto take = with_value.find(name);
    if (take == with_value.end()) throw Problem("arguments", "an option of this program", "'" + name + "'", kFix);
    if (equals == std::string::npos) {
      if (i + 1 == argc) throw Problem(name, "a value behind it", "none", kFix);
      value = argv[++i];
    }
    // Usually from an unset shell variable.
    if (value.empty() && name != "--prompt" && name != "--system") throw Problem(name, "a value", "an empty one", kFix);
    take->second(value);
  }
  if (o.help) return o;
  if (hashes && sizes) throw Problem("arguments", "--verify or --no-verify", "both", kFix);
  if (hashes || sizes) o.verify = hashes ? Verify::kHashes : Verify::kSizes;
  if (o.bundle.empty()) throw Problem("arguments", "a bundle", "none", kFix);
  if (!o.http.empty() && !length) o.request.max_new_tokens = 0;
  o.talks = o.chat && !prompt && !ids && o.requests.empty() && o.http.empty();
  if (!o.requests.empty() || !o.http.empty() || o.talks) {
    check_several(o, prompt || ids);
  } else if (prompt == ids) {
    throw Problem("arguments", "--prompt or --ids", prompt ? "both" : "neither", kFix);
  }
  if (o.repeat > 0 && !(o.logits.empty() && o.etdump.empty())) {
    throw Problem("--repeat", "it without --logits and --etdump, which are of one answer", "both", kFix);
  }
  if (warm_up && o.repeat == 0) throw Problem("--warm-up", "--repeat beside it", "none", kFix);
  check(o.request, std::numeric_limits<int>::max());  // before anything is loaded
  check_files(o);
  if (!o.cpus.empty() && !(o.compute_cpus.empty() && o.read_cpus.empty())) {
    throw Problem("--cpus", "it without --compute-cpus and --read-cpus", "both", kFix);
  }
  if (o.chat && ids) throw Problem("--chat", "--prompt beside it, or nothing", "--ids", kFix);
  if (system && !o.chat) throw Problem("--system", "--chat beside it", "none", kFix);
  return o;
}

}  // namespace pi2::runner
