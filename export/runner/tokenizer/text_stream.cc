#include "tokenizer/text_stream.h"

#include <algorithm>

namespace pi2::runner {
namespace {

constexpr std::string_view kBroken = "\xef\xbf\xbd";  // replacement for invalid bytes
constexpr std::size_t kContext = 8;                   // tokens of the prompt that are decoded before an answer

// The last tokens of a prompt, not starting inside a run of byte tokens, which must be decoded as a whole.
std::vector<std::int64_t> context(const Tokenizer& tokenizer, const std::vector<std::int64_t>& prompt) {
  std::size_t first = prompt.size() - std::min(prompt.size(), kContext);
  while (first > 0 && !tokenizer.stands_alone(prompt[first])) --first;
  return {prompt.begin() + static_cast<std::ptrdiff_t>(first), prompt.end()};
}

// Where the answer begins. A character that the prompt only begins belongs to the answer.
std::size_t end_of_prompt(const Tokenizer& tokenizer, const std::vector<std::int64_t>& ids) {
  for (std::size_t back = 0; back < 4 && back <= ids.size(); ++back) {
    if (!tokenizer.decode(ids.data(), ids.size() - back).ends_with(kBroken)) return ids.size() - back;
  }
  return ids.size();
}

// The part of `all` after its common prefix with `before`: all of `before`, unless that ends inside a character.
std::string behind(const std::string& before, const std::string& all) {
  std::size_t at =
      static_cast<std::size_t>(std::mismatch(all.begin(), all.end(), before.begin(), before.end()).first - all.begin());
  while (at > 0 && at < all.size() && (all[at] & 0xc0) == 0x80) --at;
  return all.substr(at);
}

}  // namespace

TextStream::TextStream(const Tokenizer& tokenizer, const std::vector<std::int64_t>& prompt)
    : tokenizer_(&tokenizer),
      ids_(context(tokenizer, prompt)),
      answer_(end_of_prompt(tokenizer, ids_)),
      shown_(answer_) {}

std::string TextStream::next() const {
  return behind(tokenizer_->decode(ids_.data() + start_, shown_ - start_),
                tokenizer_->decode(ids_.data() + start_, ids_.size() - start_));
}

std::string TextStream::add(std::int64_t token) {
  ids_.push_back(token);
  std::string piece = next();
  if (piece.empty() || piece.ends_with(kBroken)) return "";
  start_ = shown_;
  shown_ = ids_.size();
  return piece;
}

std::string TextStream::rest() {
  std::string piece = next();
  shown_ = ids_.size();
  return piece;
}

std::string TextStream::text() const {
  return behind(tokenizer_->decode(ids_.data(), answer_), tokenizer_->decode(ids_.data(), ids_.size()));
}

}  // namespace pi2::runner
