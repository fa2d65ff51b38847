#include "tokenizer/tokenizer.h"

#include "tokenizer/utf8.h"

namespace pi2::runner {
namespace {

constexpr std::int64_t kMostBytes = 256 << 20;  // the largest known files have some 35 MB

const Json& part(const Json& json, const char* name) {
  static const Json none;
  const auto found = json.find(name);
  return found == json.end() ? none : *found;
}

}  // namespace

Tokenizer::Tokenizer(const std::filesystem::path& file) : Tokenizer(read_json(file, kMostBytes), file.string()) {}

Tokenizer::Tokenizer(const Json& json, const std::string& where)
    : model_(Fields(json, where).sub("model")),
      normalize_(make_normalizer(part(json, "normalizer"), where + ", normalizer")),
      pre_tokenize_(make_pre_tokenizer(part(json, "pre_tokenizer"), where + ", pre_tokenizer")),
      decode_(make_decoder(part(json, "decoder"), where + ", decoder")),
      frame_(make_frame(part(json, "post_processor"), where + ", post_processor")) {
  for (const auto& [text, id] : model_.vocabulary()) tokens_[id] = {text, false};
  for (const Json& entry : Fields(json, where).list("added_tokens")) {
    const Fields fields(entry, where + ", added_tokens");
    AddedToken token{fields.number("id"),          fields.text("content"),       fields.flag("single_word", false),
                     fields.flag("lstrip", false), fields.flag("rstrip", false), fields.flag("normalized", true),
                     fields.flag("special", false)};
    if (token.content.empty()) continue;
    if (token.normalized) token.content = normalize_(token.content);
    tokens_[token.id] = {token.content, token.special};
    if (!token.content.empty()) (token.normalized ? normalized_ : raw_).add(std::move(token));
  }
  for (AddedTokens* tokens : {&raw_, &normalized_}) tokens->sort();
}

std::vector<std::int64_t> Tokenizer::encode(std::string_view text, bool special) const {
  if (!is_utf8(text)) throw Problem("prompt", "UTF-8", "other bytes", "Convert it: iconv -t UTF-8.");
  std::vector<std::int64_t> ids;
  if (special) ids = frame_.before;
  for (const Found& raw : raw_.find(text)) {
    if (raw.id >= 0) {
      ids.push_back(raw.id);
      continue;
    }
    const std::string normal = normalize_(std::string(raw.text));
    const bool first = raw.text.data() == text.data();
    for (const Found& found : normalized_.find(normal)) {
      if (found.id >= 0) {
        ids.push_back(found.id);
        continue;
      }
      for (const Piece& piece :
           pre_tokenize_({{std::string(found.text), first && found.text.data() == normal.data()}})) {
        model_.encode(piece.text, ids);
      }
    }
  }
  if (special) ids.insert(ids.end(), frame_.behind.begin(), frame_.behind.end());
  return ids;
}

bool Tokenizer::stands_alone(std::int64_t id) const {
  const auto found = tokens_.find(id);
  return found != tokens_.end() && !found->second.special && !byte_of(found->second.text);
}

std::string Tokenizer::decode(const std::int64_t* ids, std::size_t count) const {
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < count; ++i) {
    const auto found = tokens_.find(ids[i]);  // some models have more rows than tokens
    if (found != tokens_.end() && !found->second.special) texts.push_back(found->second.text);
  }
  if (texts.empty()) return "";
  std::string text;
  for (const std::string& piece : decode_(std::move(texts))) text += piece;
  return text;
}

}  // namespace pi2::runner
