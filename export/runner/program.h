// The methods of a bundle's model.pte, run by ExecuTorch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "fields.h"
#include "manifest.h"

namespace pi2::runner {

// Sets an option of the engine (pi2/executorch.h); empty: its default. Throws Problem.
void set_engine_option(const char* key, const std::string& value);
// Throws the engine's pending error as Problem, if any, and clears it.
void clear_engine_error();
void throw_engine_error();
// The engine's figures since the last call (pi2_et_stats), for the first store: this program opens one.
Json take_engine_stats();
// Whether methods loaded from now on share XNNPACK's packed weights (pi2/executorch.h). Throws Problem.
void share_weights(bool share);
// Sets the threads of ExecuTorch's pool, for all computation. Call it before the program is loaded.
void set_threads(int threads);
int threads();  // starts them if needed

// Keeps ExecuTorch's log from now on, and prints it only before an error without another explanation.
void keep_log();

class Program {
 public:
  // `dump`: record events for write_dump. Throws Problem if ExecuTorch refuses the file.
  Program(const std::filesystem::path& file, const Manifest& manifest, bool dump);
  ~Program();

  // Loads a method, once. Throws Problem, also for errors of the store.
  void load(const std::string& method);

  // Each returns the logits of the last token of each row, [N, vocab], valid until the next call. Throws Problem.
  // N = 1: `count` tokens of a lane, with a method that takes as many. `start`: position of the first token, plus
  // max_tokens for each lane before. `last`, for prefill_N: index of the prompt's last token.
  const float* read(const std::string& method, const std::int64_t* ids, std::int64_t count, std::int64_t start,
                    std::int64_t last = -1);
  // N = ids.size(): one token for each of lanes 0 to N - 1.
  const float* decode(std::vector<std::int64_t>& ids, std::vector<std::int64_t>& positions);
  // Copies the cache of lane lanes[i] to lane i, for all lanes.
  void fork(std::vector<std::int64_t> lanes);

  // Writes an ETDump of all calls, for ExecuTorch's Inspector. Throws Problem.
  void write_dump(const std::string& file);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pi2::runner
