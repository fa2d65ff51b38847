// Answers to a prompt, one or several at once.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "manifest.h"
#include "output.h"
#include "program.h"
#include "sampler.h"
#include "tokenizer/text_stream.h"

namespace pi2::runner {

struct Request {
  std::vector<std::int64_t> prompt;
  std::vector<std::vector<std::int64_t>> prompts;  // instead: several, with an answer to each
  std::int64_t max_new_tokens = 0;                 // 0: as many as there is room for
  Sampling sampling;
  std::optional<std::vector<std::string>> stop;  // strings before which answers end; as Sampling has it
  std::uint64_t seed = 0;
  int sequences = 1;              // of one prompt
  std::int64_t known = 0;         // of the prompt, tokens that the first lane has read already
  std::function<bool()> stopped;  // asked before each token; none: nobody stops it
};

// Answers to it.
inline int answers(const Request& request) {
  return request.prompts.empty() ? request.sequences : static_cast<int>(request.prompts.size());
}

// Throws Problem, which names the number that makes no sense.
void check(const Request& request, int lanes);

struct Answer {
  std::vector<std::int64_t> ids;  // with the one that ended it
  std::string text;
  // "eos", "stop" (one of the strings), "length" (max_new_tokens), "room" (prompt and answer have max_tokens), or
  // "interrupted"
  std::string ended;
};

struct Generated {
  std::vector<Answer> answers;
  double prompt_seconds = 0, decode_seconds = 0;  // until the first token; all others
  double sampling_seconds = 0;                    // of both, for choosing tokens and making text
  std::int64_t decode_steps = 0;                  // calls of decoding methods
  Json prompt_stats, decode_stats;                // of the engine
};

// Called with the number of a sequence and text that no later token changes.
using Stream = std::function<void(int, const std::string&)>;

// A prompt is read once and copied to all sequences; of several, each is read into a lane of its own. They end at their
// own times; fewer are decoded together (by the method of a smaller batch) once the last of them have ended, or all but
// one have. `tokenizer` may be null: no text. Throws Problem: no room for the prompt, it was stopped before the first
// token, or what ExecuTorch and the engine say.
Generated generate(Program& program, const Manifest& manifest, const Tokenizer* tokenizer, const Request& request,
                   const Stream& stream, LogitsFile* logits);

}  // namespace pi2::runner
