// The steps of a tokenizer.json, made from its JSON. Each maker throws Problem for a kind or a setting that it does not
// know: a text is split exactly as Hugging Face's tokenizers do, or not at all.
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

// A part of the text; `first`: the text begins with it.
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

// What stands before and behind the tokens of a text.
struct Frame {
  std::vector<std::int64_t> before, behind;
};
Frame make_frame(const Json& json, const std::string& where);

// The error for a kind or a setting that is not known.
[[noreturn]] void unknown(const std::string& where, const std::string& expected, const std::string& found);

}  // namespace pi2::runner
