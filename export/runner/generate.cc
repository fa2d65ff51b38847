#include "generate.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "stops.h"

namespace pi2::runner {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

class Generation {
 public:
  Generation(Program& program, const Manifest& manifest, const Tokenizer* tokenizer, const Request& request,
             const Stream& stream, LogitsFile* logits)
      : program_(program), manifest_(manifest), request_(request), stream_(stream), logits_(logits) {
    const int count = answers(request);
    result_.answers.resize(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) {
      const std::vector<std::int64_t>& prompt =
          request.prompts.empty() ? request.prompt : request.prompts[static_cast<std::size_t>(i)];
      const auto room = manifest.max_tokens - std::ssize(prompt);
      if (room <= 0) {
        throw NoRoom("prompt",
                     "at most " + std::to_string(manifest.max_tokens - 1) + " tokens: the bundle has room for " +
                         std::to_string(manifest.max_tokens) + ", answer included",
                     std::to_string(prompt.size()), "Shorten it, or export with a larger max_tokens.");
      }
      const std::int64_t most = request.max_new_tokens == 0 ? room : request.max_new_tokens;
      Sequence& one =
          sequences_.emplace_back(Sequence{i,
                                           prompt,
                                           std::min(most, room),
                                           Sampler(request.sampling, request.seed + static_cast<std::uint64_t>(i)),
                                           {},
                                           {}});
      one.full = most >= room ? "room" : "length";
      for (const std::int64_t token : prompt) one.sampler.add(token);
      if (tokenizer != nullptr) one.text.emplace(*tokenizer, prompt);
      if (tokenizer != nullptr && request.stop) one.stops.emplace(*request.stop);
    }
  }

  Generated run() {
    const auto start = Clock::now();
    const bool one = request_.prompts.empty();
    const float* logits = one ? read_prompt(sequences_[0]) : nullptr;
    for (std::size_t i = 0; i < sequences_.size(); ++i) take(i, one ? logits : read_prompt(sequences_[i]));
    result_.prompt_seconds = since(start);
    result_.prompt_stats = take_engine_stats();
    const auto first = Clock::now();
    if (one && sequences_.size() > 1 && !all_ended()) program_.fork(std::vector<std::int64_t>(lanes()));
    while (!all_ended()) {
      if (request_.stopped && request_.stopped()) {
        interrupt();
      } else {
        step();
      }
    }
    result_.decode_seconds = since(first);
    result_.decode_stats = take_engine_stats();
    return std::move(result_);
  }

 private:
  struct Sequence {
    int lane;
    const std::vector<std::int64_t>& prompt;
    std::int64_t limit;  // tokens at most
    Sampler sampler;
    std::optional<TextStream> text;
    std::optional<Stops> stops;
    std::string shown = "";       // text so far, with stop strings
    const char* full = "length";  // `ended` if it reaches its limit
  };

  bool ended(std::size_t i) const { return !result_.answers[i].ended.empty(); }
  bool all_ended() const {
    return std::all_of(result_.answers.begin(), result_.answers.end(),
                       [](const Answer& a) { return !a.ended.empty(); });
  }

  const float* read_prompt(const Sequence& sequence) {
    const std::vector<std::int64_t>& ids = sequence.prompt;
    const std::int64_t behind = sequence.lane * manifest_.max_tokens;
    const float* logits = nullptr;
    for (std::int64_t at = request_.known; at < std::ssize(ids);) {
      if (request_.stopped && request_.stopped()) throw Problem("interrupted");
      const PromptPiece piece = next_piece(manifest_, at, std::ssize(ids) - at);
      if (piece.size == 0) {
        logits = program_.read("forward", ids.data() + at, piece.count, behind + at);
      } else {  // a piece that is not full writes behind the prompt; these positions are overwritten before they are
                // read
        std::vector<std::int64_t> filled(ids.begin() + at, ids.begin() + at + piece.count);
        filled.resize(static_cast<std::size_t>(piece.size), filled.back());
        logits = program_.read("prefill_" + std::to_string(piece.size), filled.data(), piece.size, behind + at,
                               piece.count - 1);
      }
      at += piece.count;
    }
    return logits;
  }

  std::size_t lanes() const { return static_cast<std::size_t>(manifest_.lanes); }

  // Moves the remaining sequences to the first lanes if they then fit a smaller batch.
  void close_ranks(const std::vector<std::size_t>& going) {
    const int smallest =
        *std::lower_bound(manifest_.batches.begin(), manifest_.batches.end(), static_cast<int>(going.size()));
    if (sequences_[going.back()].lane < smallest) return;
    std::vector<std::int64_t> from(lanes(), sequences_[going[0]].lane);
    for (std::size_t k = 0; k < going.size(); ++k) {
      from[k] = sequences_[going[k]].lane;
      sequences_[going[k]].lane = static_cast<int>(k);
    }
    program_.fork(std::move(from));
  }

  // Decodes one token for each sequence that has not ended.
  void step() {
    std::vector<std::size_t> going;
    for (std::size_t i = 0; i < sequences_.size(); ++i) {
      if (!ended(i)) going.push_back(i);
    }
    close_ranks(going);
    const int last = sequences_[going.back()].lane;  // lanes ascend
    const int batch = *std::upper_bound(manifest_.batches.begin(), manifest_.batches.end(), last);
    const auto token = [&](std::size_t i) { return result_.answers[i].ids.back(); };
    const auto position = [&](std::size_t i) {
      return std::ssize(sequences_[i].prompt) + std::ssize(result_.answers[i].ids) - 1;
    };
    // Unused lanes get the token of a used one, so that they need no further neurons. What they write is never read.
    std::vector<std::int64_t> ids(static_cast<std::size_t>(batch), token(going[0]));
    std::vector<std::int64_t> positions(ids.size(), position(going[0]));
    for (const std::size_t i : going) {
      ids[sequences_[i].lane] = token(i);
      positions[sequences_[i].lane] = position(i);
    }
    const float* logits = program_.decode(ids, positions);
    ++result_.decode_steps;
    std::size_t next = 0;
    for (std::size_t i = 0; i < sequences_.size(); ++i) {
      const bool goes = next < going.size() && going[next] == i;
      if (goes) ++next;
      if (goes) {
        take(i, logits + sequences_[i].lane * manifest_.vocab);
      } else if (logits_ != nullptr) {
        logits_->add(nothing().data());
      }
    }
  }

  const std::vector<float>& nothing() {
    nothing_.resize(static_cast<std::size_t>(manifest_.vocab));
    return nothing_;
  }

  void take(std::size_t i, const float* logits) {
    const auto start = Clock::now();
    if (logits_ != nullptr) logits_->add(logits);
    Answer& answer = result_.answers[i];
    const std::int64_t token = sequences_[i].sampler.choose(logits, manifest_.vocab);
    sequences_[i].sampler.add(token);
    answer.ids.push_back(token);
    const bool eos = std::find(manifest_.eos.begin(), manifest_.eos.end(), token) != manifest_.eos.end();
    if (eos || std::ssize(answer.ids) == sequences_[i].limit) answer.ended = eos ? "eos" : sequences_[i].full;
    if (sequences_[i].text) say(i, eos ? "" : sequences_[i].text->add(token));
    result_.sampling_seconds += since(start);
  }

  // Emits new text. A stop string may end the answer here; then emits the rest.
  void say(std::size_t i, std::string piece) {
    Answer& answer = result_.answers[i];
    Sequence& one = sequences_[i];
    if (!answer.ended.empty()) piece += one.text->rest();
    if (one.stops) {
      piece = one.stops->add(piece);
      if (one.stops->reached()) {
        answer.ended = "stop";
      } else if (!answer.ended.empty()) {
        piece += one.stops->rest();
      }
      one.shown += piece;
    }
    if (!answer.ended.empty()) answer.text = answer.ended == "stop" ? one.shown : one.text->text();
    if (stream_ && !piece.empty()) stream_(static_cast<int>(i), piece);
  }

  // Ends all answers as they are.
  void interrupt() {
    for (std::size_t i = 0; i < sequences_.size(); ++i) {
      if (ended(i)) continue;
      result_.answers[i].ended = "interrupted";
      if (sequences_[i].text) say(i, "");
    }
  }

  Program& program_;
  const Manifest& manifest_;
  const Request& request_;
  const Stream& stream_;
  LogitsFile* logits_;
  std::vector<Sequence> sequences_;
  std::vector<float> nothing_;  // logits for sequences that have ended
  Generated result_;
};

}  // namespace

void check(const Request& r, int lanes) {
  check(r.sampling, "");
  if (r.sequences < 1 || answers(r) > lanes) {
    throw Problem(r.prompts.empty() ? "num_return_sequences" : "prompts",
                  "1 to " + std::to_string(lanes) + ", the lanes of the bundle",
                  std::to_string(r.prompts.empty() ? r.sequences : answers(r)), "Correct it.");
  }
  if (r.max_new_tokens < 0) {
    throw Problem("max_new_tokens", "1 or more, or 0: as many as there is room for", std::to_string(r.max_new_tokens),
                  "Correct it.");
  }
}

Generated generate(Program& program, const Manifest& manifest, const Tokenizer* tokenizer, const Request& request,
                   const Stream& stream, LogitsFile* logits) {
  take_engine_stats();
  return Generation(program, manifest, tokenizer, request, stream, logits).run();
}

}  // namespace pi2::runner
