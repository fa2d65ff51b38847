// The steps of a tokenizer.json. Each factory throws Problem for an unknown kind or setting: a text is split exactly as
// by Hugging Face's tokenizers, or not at all.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fields.h"

namespace pi2::runner {

using Normalize = std::function<std::string(std::string)>;
Normalize make_normalizer(const Json& json, const std::string& where);

// A part of the text; `first`: it is at the start of the text.
struct Piece {
  std::string text;
  bool first;
};
using PreTokenize = std::function<std::vector<Piece>(std::vector<Piece>)>;
PreTokenize make_pre_tokenizer(const Json& json, const std::string& where);

using Decode = std::function<std::vector<std::string>(std::vector<std::string>)>;
Decode make_decoder(const Json& json, const std::string& where);
// The byte that a token such as <0x0A> stands for.
std::optional<char> byte_of(const std::string& token);

// The tokens before and after a text.
struct Frame {
  std::vector<std::int64_t> before, behind;
};
Frame make_frame(const Json& json, const std::string& where);

// The error for an unknown kind or setting.
[[noreturn]] void unknown(const std::string& where, const std::string& expected, const std::string& found);

}  // namespace pi2::runner
