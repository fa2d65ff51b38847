// A bundle, open, and answers of it: what the program and the Android library share.
#pragma once

#include <memory>
#include <optional>

#include "options.h"
#include "report.h"

namespace pi2::runner {

// One per process: the engine's options are the process's.
class Session {
 public:
  // Checks the bundle, sets the engine's options and loads the program. Throws Problem.
  explicit Session(const Options& options);

  bool has_tokenizer() const { return tokenizer_.has_value(); }
  // One prompt of `options`, whose bundle and engine are those of the session. Throws Problem.
  Run generate(const Options& options, const Stream& stream);

 private:
  Manifest manifest_;
  std::optional<Tokenizer> tokenizer_;
  std::unique_ptr<Program> program_;
  std::int64_t cache_bytes_ = 0;
  double load_seconds_ = 0;
};

}  // namespace pi2::runner
