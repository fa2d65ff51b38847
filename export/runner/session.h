// A bundle, open, and answers of it: what the program and the Android library share.
#pragma once

#include <memory>
#include <optional>

#include "cpus.h"
#include "generation_config.h"
#include "options.h"
#include "report.h"

namespace pi2::runner {

// One at a time: the engine's options are the process's.
class Session {
 public:
  // Checks the bundle, sets the engine's options and loads the program. Throws Problem; also if there is another one.
  explicit Session(const Options& options);

  bool has_tokenizer() const { return tokenizer_.has_value(); }
  int lanes() const { return manifest_.lanes; }
  // One prompt of `options`, whose bundle and engine are those of the session. Throws Problem.
  Run generate(const Options& options, const Stream& stream);
  // Binds threads that read or wait for clients, and have come since it was opened, to their CPUs. Throws Problem.
  void bind_readers() const;
  // Closes the store; nothing else may be called then. Throws Problem: the trace cannot be written.
  void close();

 private:
  // Of the process, as long as it is there. Throws Problem: another one is.
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
  std::vector<std::int64_t> fed_;  // what the first lane has read and said, but for its last token
  std::unique_ptr<Program> program_;
  std::int64_t cache_bytes_ = 0;
  double load_seconds_ = 0;
};

}  // namespace pi2::runner
