// Text of a growing sequence, in pieces.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace pi2::runner {

// A token may be part of a character, and some tokenizers write a space before a word only if one is before it. So what
// is new is the difference of two decodings that begin at an earlier token, and it waits while it ends within a
// character. No later token changes it, but for one: a byte token that makes no character of the ones before it, with
// which those become U+FFFD too. export/text.py does the same.
class TextStream {
 public:
  TextStream(const Tokenizer& tokenizer, const std::vector<std::int64_t>& prompt);

  std::string add(std::int64_t token);  // what is certain with this token
  std::string rest();                   // at the end: what was held back
  std::string text() const;             // of all tokens that were added, decoded at once

 private:
  std::string next() const;

  const Tokenizer* tokenizer_;
  std::vector<std::int64_t> ids_;
  std::size_t answer_;  // where it begins
  std::size_t start_ = 0, shown_;
};

}  // namespace pi2::runner
