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

// What the engine takes for its store (pi2/executorch.h); empty: its default. Throws Problem.
void set_engine_option(const char* key, const std::string& value);
// What went wrong in the engine where nobody could be told, since it was cleared. Throws Problem.
void clear_engine_error();
void throw_engine_error();
// What the engine did since the last call (pi2_et_stats), of the first store: this program opens one.
Json take_engine_stats();
// Whether methods loaded from now on use what XNNPACK has packed for others (pi2/executorch.h). Throws Problem.
void share_weights(bool share);
// Threads of ExecuTorch's pool, for everything that is computed; before the program is loaded.
void set_threads(int threads);
int threads();  // starts them, if nobody has

// From now on ExecuTorch's log is kept, and goes to standard error only before an error that nobody else explains.
void keep_log();

class Program {
 public:
  // `dump`: record events for write_dump. Throws Problem: ExecuTorch does not take it.
  Program(const std::filesystem::path& file, const Manifest& manifest, bool dump);
  ~Program();

  // Loads a method, once; what is wrong with the store is said here. Throws Problem.
  void load(const std::string& method);

  // Each returns the logits of the last token of each row, [N, vocab], valid until the next call. Throws Problem.
  // ids, N = 1: the next tokens of a lane, by one of the methods that take so many; `start`: the position of the first,
  // and max_tokens for each lane before.
  // `last`: of prefill_N, which of them is the last of a prompt.
  const float* read(const std::string& method, const std::int64_t* ids, std::int64_t count, std::int64_t start,
                    std::int64_t last = -1);
  // N = ids.size(): one token for each of the lanes 0 to N - 1.
  const float* decode(std::vector<std::int64_t>& ids, std::vector<std::int64_t>& positions);
  // Lane i continues what lanes[i] has read; as many as there are.
  void fork(std::vector<std::int64_t> lanes);

  // An ETDump of all that was run, for ExecuTorch's Inspector. Throws Problem.
  void write_dump(const std::string& file);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pi2::runner
