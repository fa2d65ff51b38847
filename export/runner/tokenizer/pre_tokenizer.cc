#include <algorithm>

#include "tokenizer/byte_level.h"
#include "tokenizer/parts.h"
#include "tokenizer/replace.h"

namespace pi2::runner {
namespace {

constexpr const char* kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

enum class Behavior { kRemoved, kIsolated, kContiguous, kWithPrevious, kWithNext };

Behavior behavior_of(const Fields& fields) {
  const std::string& name = fields.text("behavior");
  if (name == "Removed") return Behavior::kRemoved;
  if (name == "Isolated") return Behavior::kIsolated;
  if (name == "Contiguous") return Behavior::kContiguous;
  if (name == "MergedWithPrevious") return Behavior::kWithPrevious;
  if (name == "MergedWithNext") return Behavior::kWithNext;
  unknown(fields.where(), "Removed, Isolated, Contiguous, MergedWithPrevious or MergedWithNext", name);
}

// Applies the behaviour to matches and the text between them.
std::vector<Part> arrange(std::vector<Part> parts, Behavior behavior) {
  if (behavior == Behavior::kIsolated) return parts;
  if (behavior == Behavior::kRemoved) {
    std::erase_if(parts, [](const Part& part) { return part.match; });
    return parts;
  }
  if (behavior == Behavior::kWithNext) std::reverse(parts.begin(), parts.end());
  std::vector<Part> out;
  bool before = false;  // whether the part before was a match
  for (const Part& part : parts) {
    const bool joins = behavior == Behavior::kContiguous ? part.match == before : part.match && !before;
    before = part.match;
    if (joins && !out.empty()) {
      out.back().begin = std::min(out.back().begin, part.begin);
      out.back().end = std::max(out.back().end, part.end);
    } else {
      out.push_back(part);
    }
  }
  if (behavior == Behavior::kWithNext) std::reverse(out.begin(), out.end());
  return out;
}

std::vector<Piece> split(const std::vector<Piece>& pieces, const Pattern& pattern, Behavior behavior, bool invert) {
  std::vector<Piece> out;
  for (const Piece& piece : pieces) {
    std::vector<Part> parts = pattern.parts(piece.text);
    if (invert) {
      for (Part& part : parts) part.match = !part.match;
    }
    for (const Part& part : arrange(std::move(parts), behavior)) {
      if (part.begin == part.end) continue;
      out.push_back({piece.text.substr(part.begin, part.end - part.begin), piece.first && part.begin == 0});
    }
  }
  return out;
}

PreTokenize byte_level(const Fields& fields) {
  const bool space = fields.flag("add_prefix_space", true);
  const auto pattern = fields.flag("use_regex", true) ? std::make_shared<Pattern>(kGpt2) : nullptr;
  return [=](std::vector<Piece> pieces) {
    for (Piece& piece : pieces) {
      if (space && piece.text.front() != ' ') piece.text.insert(0, 1, ' ');
    }
    if (pattern != nullptr) pieces = split(pieces, *pattern, Behavior::kIsolated, false);
    for (Piece& piece : pieces) piece.text = bytes_as_characters(piece.text);
    return pieces;
  };
}

PreTokenize metaspace(const Fields& fields) {
  const std::string by = fields.text("replacement");
  const std::string scheme = fields.has("prepend_scheme")            ? fields.text("prepend_scheme")
                             : fields.flag("add_prefix_space", true) ? "always"
                                                                     : "never";
  if (scheme != "always" && scheme != "first" && scheme != "never") {
    unknown(fields.where(), "the prepend_scheme always, first or never", scheme);
  }
  const bool splits = fields.flag("split", true);
  const Pattern space(Fields(Json{{"String", " "}}, fields.where())),
      mark(Fields(Json{{"String", by}}, fields.where()));
  return [=](std::vector<Piece> pieces) {
    for (Piece& piece : pieces) {
      piece.text = space.replace(piece.text, by);
      if (!piece.text.starts_with(by) && (scheme == "always" || (scheme == "first" && piece.first))) {
        piece.text.insert(0, by);
      }
    }
    return splits ? split(pieces, mark, Behavior::kWithNext, false) : pieces;
  };
}

}  // namespace

PreTokenize make_pre_tokenizer(const Json& json, const std::string& where) {
  if (json.is_null()) return [](std::vector<Piece> pieces) { return pieces; };
  const Fields fields(json, where);
  const std::string& type = fields.text("type");
  if (type == "Sequence") {
    std::vector<PreTokenize> steps;
    for (const Json& step : fields.list("pretokenizers")) steps.push_back(make_pre_tokenizer(step, where));
    return [steps = std::move(steps)](std::vector<Piece> pieces) {
      for (const PreTokenize& step : steps) pieces = step(std::move(pieces));
      return pieces;
    };
  }
  if (type == "ByteLevel") return byte_level(fields);
  if (type == "Metaspace") return metaspace(fields);
  if (type == "Split" || type == "Digits") {
    const bool digits = type == "Digits";
    const Pattern pattern = digits ? Pattern(R"(\p{N})") : Pattern(fields.sub("pattern"));
    const Behavior behavior = !digits                                   ? behavior_of(fields)
                              : fields.flag("individual_digits", false) ? Behavior::kIsolated
                                                                        : Behavior::kContiguous;
    const bool invert = !digits && fields.flag("invert", false);
    return [=](const std::vector<Piece>& pieces) { return split(pieces, pattern, behavior, invert); };
  }
  unknown(where, "ByteLevel, Digits, Metaspace, Split or Sequence", type);
}

}  // namespace pi2::runner
