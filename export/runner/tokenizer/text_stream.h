// Text of a growing sequence, in pieces that no later token changes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace pi2::runner {

// A token may be part of a character, and some tokenizers write a space before a word only if one is before it. So what
// is new is the difference of two decodings that begin at an earlier token, and it waits while it ends within a
// character. export/text.py does the same.
class TextStream {
 public:
  TextStream(const Tokenizer& tokenizer, const std::vector<std::int64_t>& prompt);

  std::string add(std::int64_t token);  // what is certain with this token
  std::string rest();                   // at the end: what was held back

 private:
  std::string next() const;

  const Tokenizer* tokenizer_;
  std::vector<std::int64_t> ids_;
  std::size_t start_ = 0, shown_;
};

}  // namespace pi2::runner
