// An open bundle that generates answers; shared by the program and the Android library.
#pragma once

#include <memory>
#include <optional>

#include "cpus.h"
#include "generation_config.h"
#include "options.h"
#include "report.h"

namespace pi2::runner {

// One at a time, because the engine's options belong to the process.
class Session {
 public:
  // Checks the bundle, sets the engine's options and loads the program. Throws Problem, also if another session is
  // open.
  explicit Session(const Options& options);

  bool has_tokenizer() const { return tokenizer_.has_value(); }
  int lanes() const { return manifest_.lanes; }
  // Answers the prompt of `options`; bundle and engine are those of the session. Throws Problem.
  Run generate(const Options& options, const Stream& stream);
  // Binds threads started since opening that read or wait for clients to their CPUs. Throws Problem.
  void bind_readers() const;
  // Closes the store; the last call. Throws Problem if the trace cannot be written.
  void close();

 private:
  // Held by the one session of the process. Throws Problem if there is another.
  class Claim {
   public:
    Claim();
    ~Claim();
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;
  };

  void load_decoding(int sequences);

  Claim claim_;
  const Cpus before_ = allowed_cpus();
  Roles cpus_;
  Manifest manifest_;
  std::optional<Tokenizer> tokenizer_;
  GenerationConfig config_;
  std::vector<std::int64_t> fed_;  // tokens in the first lane: prompt and answer without its last token
  std::unique_ptr<Program> program_;
  std::int64_t cache_bytes_ = 0;
  double load_seconds_ = 0;
};

}  // namespace pi2::runner
