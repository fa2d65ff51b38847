// Generates one or several answers at once.
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
  std::vector<std::vector<std::int64_t>> prompts;  // instead of prompt: several, one answer each
  std::int64_t max_new_tokens = 0;                 // 0: as many as fit
  Sampling sampling;
  std::optional<std::vector<std::string>> stop;  // stop strings; unset: those of the model
  std::uint64_t seed = 0;
  int sequences = 1;              // answers to one prompt
  std::int64_t known = 0;         // tokens of the prompt that the first lane has read already
  std::function<bool()> stopped;  // called before each token; may be empty
};

// The number of answers to a request.
inline int answers(const Request& request) {
  return request.prompts.empty() ? request.sequences : static_cast<int>(request.prompts.size());
}

// Throws Problem with the name of an invalid number.
void check(const Request& request, int lanes);

struct Answer {
  std::vector<std::int64_t> ids;  // including the end token
  std::string text;
  // "eos", "stop" (a stop string), "length" (max_new_tokens), "room" (prompt and answer reach max_tokens) or
  // "interrupted"
  std::string ended;
};

struct Generated {
  std::vector<Answer> answers;
  double prompt_seconds = 0, decode_seconds = 0;  // up to the first token; all others
  double sampling_seconds = 0;                    // part of both: sampling and detokenising
  std::int64_t decode_steps = 0;                  // calls of decode methods
  Json prompt_stats, decode_stats;                // figures of the engine
};

// Called with the number of a sequence and new text that later tokens do not change.
using Stream = std::function<void(int, const std::string&)>;

// A single prompt is read once and copied to all sequences; several prompts are read into lanes of their own. Sequences
// end independently. When the last lanes, or all but one, have ended, the method of a smaller batch takes over.
// `tokenizer` may be null: no text. Throws Problem if the prompt does not fit, if it was stopped before the first
// token, and for errors of ExecuTorch and the engine.
Generated generate(Program& program, const Manifest& manifest, const Tokenizer* tokenizer, const Request& request,
                   const Stream& stream, LogitsFile* logits);

}  // namespace pi2::runner
