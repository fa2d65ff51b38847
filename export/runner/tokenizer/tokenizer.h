// Text to tokens and back, as Hugging Face's tokenizers do it with the same tokenizer.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tokenizer/added_tokens.h"
#include "tokenizer/bpe.h"
#include "tokenizer/parts.h"

namespace pi2::runner {

class Tokenizer {
 public:
  // Throws Problem: it cannot be read, or has a part that this does not know, which the message names.
  explicit Tokenizer(const std::filesystem::path& file);
  Tokenizer(const Json& json, const std::string& where);  // of what the file has

  // `special`: with the tokens that stand before and behind a text. Throws Problem: the text is no UTF-8.
  std::vector<std::int64_t> encode(std::string_view text, bool special) const;
  // Without special tokens.
  std::string decode(const std::int64_t* ids, std::size_t count) const;
  // Whether this token has text that is the same whatever is before it, but for a space: neither a byte of a character,
  // which is decoded with all bytes beside it, nor one without text, such as a special token.
  bool stands_alone(std::int64_t id) const;

 private:
  struct Token {
    std::string text;
    bool special = false;
  };
  Bpe model_;
  Normalize normalize_;
  PreTokenize pre_tokenize_;
  Decode decode_;
  Frame frame_;
  AddedTokens raw_, normalized_;  // looked for in the text as it is, and in the normalised text
  std::unordered_map<std::int64_t, Token> tokens_;
};

}  // namespace pi2::runner
