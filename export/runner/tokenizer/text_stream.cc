#include "tokenizer/text_stream.h"

#include <algorithm>

namespace pi2::runner {
namespace {

constexpr std::ptrdiff_t kContext = 8;  // tokens of the prompt that an answer is decoded after

}  // namespace

TextStream::TextStream(const Tokenizer& tokenizer, const std::vector<std::int64_t>& prompt)
    : tokenizer_(&tokenizer),
      ids_(prompt.end() - std::min(std::ssize(prompt), kContext), prompt.end()),
      shown_(ids_.size()) {}

std::string TextStream::next() const {
  const std::string before = tokenizer_->decode(ids_.data() + start_, shown_ - start_);
  const std::string all = tokenizer_->decode(ids_.data() + start_, ids_.size() - start_);
  return all.substr(std::min(before.size(), all.size()));
}

std::string TextStream::add(std::int64_t token) {
  ids_.push_back(token);
  std::string piece = next();
  if (piece.empty() || piece.ends_with("\xef\xbf\xbd")) return "";
  start_ = shown_;
  shown_ = ids_.size();
  return piece;
}

std::string TextStream::rest() {
  std::string piece = next();
  shown_ = ids_.size();
  return piece;
}

}  // namespace pi2::runner
