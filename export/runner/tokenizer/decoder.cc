#include "tokenizer/byte_level.h"
#include "tokenizer/parts.h"
#include "tokenizer/replace.h"

namespace pi2::runner {
namespace {

using Tokens = std::vector<std::string>;

std::string joined(const Tokens& tokens) {
  std::string text;
  for (const std::string& token : tokens) text += token;
  return text;
}

Tokens byte_fallback(const Tokens& tokens) {
  Tokens out;
  std::string bytes;
  const auto flush = [&] {
    if (is_utf8(bytes)) {
      if (!bytes.empty()) out.push_back(bytes);
    } else {
      out.insert(out.end(), bytes.size(), "\xef\xbf\xbd");
    }
    bytes.clear();
  };
  for (const std::string& token : tokens) {
    if (const std::optional<char> byte = byte_of(token)) {
      bytes += *byte;
    } else {
      flush();
      out.push_back(token);
    }
  }
  flush();
  return out;
}

std::string stripped(const std::string& token, char32_t what, std::int64_t start, std::int64_t stop) {
  std::u32string points = code_points(token);
  std::size_t from = 0, to = points.size();
  while (start-- > 0 && from < to && points[from] == what) ++from;
  while (stop-- > 0 && to > from && points[to - 1] == what) --to;
  return utf8(std::u32string_view(points).substr(from, to - from));
}

}  // namespace

std::optional<char> byte_of(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return std::nullopt;
  int value = 0;
  for (const char digit : {token[3], token[4]}) {
    const auto at =
        std::string_view("0123456789abcdef").find(static_cast<char>(digit >= 'A' && digit <= 'F' ? digit + 32 : digit));
    if (at == std::string_view::npos) return std::nullopt;
    value = value * 16 + static_cast<int>(at);
  }
  return static_cast<char>(value);
}

Decode make_decoder(const Json& json, const std::string& where) {
  if (json.is_null()) {
    return [](const Tokens& tokens) {
      std::string text;
      for (const std::string& token : tokens) text += (&token == tokens.data() ? "" : " ") + token;
      return Tokens{text};
    };
  }
  const Fields fields(json, where);
  const std::string& type = fields.text("type");
  if (type == "Sequence") {
    std::vector<Decode> steps;
    for (const Json& step : fields.list("decoders")) steps.push_back(make_decoder(step, where));
    return [steps = std::move(steps)](Tokens tokens) {
      for (const Decode& step : steps) tokens = step(std::move(tokens));
      return tokens;
    };
  }
  if (type == "ByteLevel") {
    return [](const Tokens& tokens) {
      std::string bytes;
      for (const std::string& token : tokens) bytes += characters_as_bytes(token);
      return Tokens{repaired(bytes)};
    };
  }
  if (type == "ByteFallback") return byte_fallback;
  if (type == "Fuse") return [](const Tokens& tokens) { return Tokens{joined(tokens)}; };
  if (type == "Replace") {
    return [pattern = Pattern(fields.sub("pattern")), by = fields.text("content")](Tokens tokens) {
      for (std::string& token : tokens) token = pattern.replace(token, by);
      return tokens;
    };
  }
  if (type == "Strip") {
    const std::u32string what = code_points(fields.text("content"));
    if (what.size() != 1) unknown(where, "one character to strip", shown(json));
    return [c = what[0], start = fields.number("start"), stop = fields.number("stop")](Tokens tokens) {
      for (std::string& token : tokens) token = stripped(token, c, start, stop);
      return tokens;
    };
  }
  if (type == "Metaspace") {
    const bool drops =
        fields.has("prepend_scheme") ? fields.text("prepend_scheme") != "never" : fields.flag("add_prefix_space", true);
    const Pattern mark(Fields(Json{{"String", fields.text("replacement")}}, where));
    return [=](Tokens tokens) {
      for (std::string& token : tokens) token = mark.replace(token, drops && &token == tokens.data() ? "" : " ");
      return tokens;
    };
  }
  unknown(where, "ByteFallback, ByteLevel, Fuse, Metaspace, Replace, Strip or Sequence", type);
}

}  // namespace pi2::runner
