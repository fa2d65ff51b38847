// Tokens that are matched in the text itself, before it is split: <|im_end|> and the like.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/regex.h"

namespace pi2::runner {

struct AddedToken {
  std::int64_t id;
  std::string content;
  bool single_word, lstrip, rstrip, normalized, special;
};

// A part of a text: a token, or text (-1).
struct Found {
  std::string_view text;
  std::int64_t id;
};

class AddedTokens {
 public:
  AddedTokens();
  void add(AddedToken token);  // found by its content, which is not empty
  void sort();                 // after the last add

  // All parts of the text in order. Of tokens that begin at the same place, the longest is taken.
  std::vector<Found> find(std::string_view text) const;

 private:
  const AddedToken* at(std::string_view text, std::size_t place) const;

  std::array<std::vector<AddedToken>, 256> of_;  // by the first byte, longest first
  Regex word_at_end_, word_at_start_, space_at_end_, space_at_start_;
};

}  // namespace pi2::runner
