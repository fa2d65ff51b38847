#include "session.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <utility>
#include <vector>

#include "bundle.h"
#include "chat.h"

namespace pi2::runner {
namespace {

namespace fs = std::filesystem;

std::atomic<bool> claimed = false;

double since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The part of the budget that is left for neurons.
std::int64_t cache_of(const Options& options, const Manifest& manifest) {
  // The manifest counts a few threads. Each further one has a stack, buffers, and attention sums per 512 tokens.
  const std::int64_t further = std::max(0, options.threads - 8), splits = (manifest.max_tokens + 511) / 512;
  const std::int64_t fixed = manifest.fixed_bytes + further * ((128 << 10) + splits * (256 << 10));
  const std::int64_t left = options.budget - fixed;
  if (left < 1024) {
    const auto mib = std::to_string((fixed + (1 << 20) - 1) >> 20) + " MiB";
    throw Problem("--budget",
                  "more than " + std::to_string(fixed) + " bytes (" + mib + "), which it takes without any neurons",
                  std::to_string(options.budget) + " bytes", "Give it more, or export with fewer tokens or batches.");
  }
  if (left < std::min(manifest.token_bytes, manifest.ffn_bytes)) {
    std::fprintf(stderr,
                 "warning: the cache of %.1f MiB holds less than the %.1f MiB of neurons that a token wants on "
                 "average; much of it comes from flash for each token.\n",
                 static_cast<double>(left) / 0x1p20, static_cast<double>(manifest.token_bytes) / 0x1p20);
  }
  return std::min(left, manifest.store_bytes) / 1024 * 1024;
}

// Sets the engine's options. Returns the bytes of the cache; 0: no budget.
std::int64_t set_engine(const Options& o, const Manifest& manifest) {
  std::int64_t cache_bytes = 0;
  const fs::path store = o.store.empty() ? fs::path(o.bundle) / "model.pi2" : fs::path(o.store);
  set_engine_option("store_path", fs::absolute(store).string());
  if (o.budget >= 0) {
    share_heap();
    cache_bytes = cache_of(o, manifest);
  }
  // Sets all options, because those of an earlier session persist.
  set_engine_option("cache_bytes_kib", o.budget < 0 ? "" : std::to_string(cache_bytes / 1024));
  set_engine_option("threads", o.threads > 0 ? std::to_string(o.threads) : "");
  set_engine_option("io_threads", o.io_threads);
  set_engine_option("engine", o.engine);
  set_engine_option("policy", o.policy);
  set_engine_option("trace", o.trace.empty() || o.trace == "-" ? o.trace : fs::absolute(o.trace).string());
  return cache_bytes;
}

// The prompt by the model's chat template.
std::string chat(const Options& o, const Manifest& manifest) {
  const fs::path file = fs::path(o.bundle) / "chat.json";
  if (!manifest.files.contains("chat.json")) {  // files that the manifest does not name are not checked
    const bool other = manifest.files.contains("chat_template.jinja");
    throw Problem(file.string(), "the chat template of the bundle",
                  other ? "no such file: export leaves it out if what the template writes depends on what is said"
                        : "no such file",
                  other ? "Pass the prompt without --chat, as the template would write it; torch-pi2 run takes --chat."
                        : "Pass the prompt without --chat, or export with a tokenizer that has a chat template.");
  }
  std::vector<Message> messages = o.messages;
  if (messages.empty()) {
    if (!o.system.empty() || o.empty_system) messages.push_back({"system", o.system});
    messages.push_back({"user", o.prompt});
  }
  return chat_text(read_json(file, kMostSmall), file.string(), messages);
}

// Bytes per token: an upper bound of the average.
constexpr std::int64_t kTokenBytes = 256;

// Refuses text that cannot fit before tokenising, which takes time and many times its size.
std::vector<std::int64_t> tokens_of(const std::string& text, bool special, const Tokenizer& tokenizer,
                                    const Manifest& manifest) {
  if (std::ssize(text) / kTokenBytes >= manifest.max_tokens) {
    throw NoRoom("prompt",
                 "at most " + std::to_string(manifest.max_tokens - 1) + " tokens: the bundle has room for " +
                     std::to_string(manifest.max_tokens) + ", answer included",
                 std::to_string(text.size()) + " bytes of text", "Shorten it, or export with a larger max_tokens.");
  }
  return tokenizer.encode(text, special);
}

std::vector<std::int64_t> checked(std::vector<std::int64_t> ids, const Manifest& manifest) {
  const std::int64_t vocab = manifest.vocab;
  const auto wrong = std::find_if(ids.begin(), ids.end(), [&](std::int64_t id) { return id < 0 || id >= vocab; });
  if (ids.empty() || wrong != ids.end()) {
    throw Problem("prompt", "tokens of one sequence below " + std::to_string(vocab),
                  ids.empty() ? "no tokens" : "the token " + std::to_string(*wrong),
                  "Pass at least one token, and the tokenizer of this model.");
  }
  return ids;
}

std::vector<std::int64_t> prompt_ids(const Options& o, const Tokenizer* tokenizer, const Manifest& manifest) {
  std::vector<std::int64_t> ids = o.request.prompt;
  if (ids.empty() && tokenizer != nullptr) {
    ids = o.chat ? tokens_of(chat(o, manifest), false, *tokenizer, manifest)
                 : tokens_of(o.prompt, true, *tokenizer, manifest);
  }
  return checked(std::move(ids), manifest);
}

}  // namespace

Session::Claim::Claim() {
  if (claimed.exchange(true)) {
    throw Problem("bundle", "one that is open in this process", "a second one", "Close the other one first.");
  }
}

Session::Claim::~Claim() { claimed = false; }

Session::Session(const Options& o) {
  const auto started = std::chrono::steady_clock::now();
  cpus_ = roles_of(o.cpus, o.compute_cpus, o.read_cpus, o.threads);
  if (!cpus_.why.empty()) std::fprintf(stderr, "--cpus auto: %s: nothing is bound.\n", cpus_.why.c_str());
  manifest_ = open_bundle(o.bundle, o.store, o.verify);
  for (const std::string& library : o.backends) {
    if (dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      throw Problem("--backend", "a library that can be loaded", dlerror(), "Check its path and LD_LIBRARY_PATH.");
    }
  }
  bind_this_thread(cpus_);  // and the threads that it starts: ExecuTorch's and the delegate's
  static const int by_default = threads();
  const int one_each = cpus_.compute ? static_cast<int>(cpus_.compute->size()) : by_default;
  const int wanted = o.threads > 0 ? o.threads : one_each;
  if (wanted != threads()) set_threads(wanted);
  cache_bytes_ = set_engine(o, manifest_);
  // Files that the manifest does not name are not checked.
  const auto has = [&](const char* name) { return manifest_.files.contains(name); };
  if (has("tokenizer.json")) {
    tokenizer_.emplace(fs::path(o.bundle) / "tokenizer.json");
  } else if (o.request.prompt.empty() && o.requests.empty()) {
    throw Problem((fs::path(o.bundle) / "manifest.json").string() + ", files", "tokenizer.json, for text", "none",
                  "Pass token ids with --ids, or export with a tokenizer.");
  }
  if (const fs::path file = fs::path(o.bundle) / "generation_config.json"; has("generation_config.json")) {
    config_ = generation_config(read_json(file, kMostSmall), file.string());
  }
  trim_heap();
  program_ = std::make_unique<Program>(fs::path(o.bundle) / "model.pte", manifest_, !o.etdump.empty());
  share_weights(manifest_.linears == "float32");
  program_->load("forward");
  for (const std::int64_t size : manifest_.prefills) program_->load("prefill_" + std::to_string(size));
  bind_readers();
  load_seconds_ = since(started);
}

void Session::bind_readers() const { runner::bind_readers(cpus_, before_); }

Run Session::generate(const Options& o, const Stream& stream) {
  const Tokenizer* tokenizer = tokenizer_ ? &*tokenizer_ : nullptr;
  Run run{o, manifest_, {}, 0, cache_bytes_, 0, threads(), cpus_, {}};
  Request& request = run.options.request;
  for (const std::string& text : o.prompts) {
    const std::vector<std::int64_t> ids =
        tokenizer == nullptr ? request.prompt : tokens_of(text, true, *tokenizer, manifest_);
    request.prompts.push_back(checked(ids, manifest_));
    run.prompt_tokens += std::ssize(request.prompts.back());
  }
  check(request, manifest_.lanes);
  const auto started = std::chrono::steady_clock::now();
  load_decoding(answers(request));
  run.load_seconds = load_seconds_ += since(started);
  if (request.prompts.empty()) {
    request.prompt = prompt_ids(o, tokenizer, manifest_);
    run.prompt_tokens = std::ssize(request.prompt);
  }
  request.sampling = request.sampling.or_as(config_.sampling);
  if (!request.stop) {
    request.stop = config_.stop;
  } else if (tokenizer == nullptr && !request.stop->empty()) {
    throw Problem("stop strings", "a bundle with a tokenizer", "one without", "Leave them out.");
  }
  if (o.goes_on) {
    const auto same = std::mismatch(fed_.begin(), fed_.end(), request.prompt.begin(), request.prompt.end());
    request.known = std::min<std::int64_t>(same.first - fed_.begin(), run.prompt_tokens - 1);
  }
  fed_.clear();
  std::optional<LogitsFile> logits;
  if (!o.logits.empty()) logits.emplace(o.logits, answers(request), manifest_.vocab);
  run.generated = runner::generate(*program_, manifest_, tokenizer, request, stream, logits ? &*logits : nullptr);
  if (answers(request) == 1 && request.prompts.empty()) {
    fed_ = request.prompt;
    const std::vector<std::int64_t>& ids = run.generated.answers[0].ids;
    fed_.insert(fed_.end(), ids.begin(), ids.end() - 1);
  }
  run.memory = memory_of_process();
  if (logits) logits->close();
  if (!o.etdump.empty()) program_->write_dump(o.etdump);
  return run;
}

void Session::close() {
  clear_engine_error();
  program_.reset();
  throw_engine_error();
}

// Loads the decode methods that the sequences may need, before they wait for them.
void Session::load_decoding(int sequences) {
  const int most = *std::lower_bound(manifest_.batches.begin(), manifest_.batches.end(), sequences);
  for (const int batch : manifest_.batches) {
    if (batch == most || (sequences > 1 && batch < most)) program_->load("decode_b" + std::to_string(batch));
  }
  if (sequences > 1) program_->load("fork");
}

}  // namespace pi2::runner
