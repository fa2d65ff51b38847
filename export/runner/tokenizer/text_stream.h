// The text of a growing sequence, in pieces.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace pi2::runner {

// A token may be part of a character, and some tokenizers write a space before a word only if another word precedes it.
// So new text is the difference of two decodings that begin at an earlier token, and it waits while it ends inside a
// character. Later tokens do not change it, with one exception: a byte token that completes no character turns the
// bytes before it into U+FFFD, too. export/text.py does the same.
class TextStream {
 public:
  TextStream(const Tokenizer& tokenizer, const std::vector<std::int64_t>& prompt);

  std::string add(std::int64_t token);  // new text that is final
  std::string rest();                   // at the end: the text held back
  std::string text() const;             // all added tokens, decoded at once

 private:
  std::string next() const;

  const Tokenizer* tokenizer_;
  std::vector<std::int64_t> ids_;
  std::size_t answer_;  // start of the answer
  std::size_t start_ = 0, shown_;
};

}  // namespace pi2::runner
