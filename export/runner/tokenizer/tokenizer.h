// Text to tokens and back, like Hugging Face's tokenizers with the same tokenizer.json.
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
  // Throws Problem if the file cannot be read or has an unknown part, which the message names.
  explicit Tokenizer(const std::filesystem::path& file);
  Tokenizer(const Json& json, const std::string& where);  // from the file's JSON

  // `special`: with the tokens before and after a text. Throws Problem if the text is not UTF-8.
  std::vector<std::int64_t> encode(std::string_view text, bool special) const;
  // Without special tokens.
  std::string decode(const std::int64_t* ids, std::size_t count) const;
  // Whether the token's text does not depend on the tokens before it, except for a space: neither a byte token, which
  // is decoded together with its neighbours, nor a token without text, such as a special token.
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
  AddedTokens raw_, normalized_;  // matched in the original text, and in the normalised text
  std::unordered_map<std::int64_t, Token> tokens_;
};

}  // namespace pi2::runner
