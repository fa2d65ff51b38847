// Replaces the matches of a pattern of a tokenizer.json: {"String": ...} or {"Regex": ...}.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fields.h"
#include "tokenizer/parts.h"
#include "tokenizer/regex.h"

namespace pi2::runner {

class Pattern {
 public:
  static constexpr std::size_t kMostText = 4 << 20;  // repeated doubling would exhaust memory

  explicit Pattern(const Fields& json) {
    if (json.has("Regex")) {
      regex_ = std::make_shared<Regex>(json.text("Regex"), json.where());
    } else if (json.has("String")) {
      text_ = json.text("String");
    } else {
      unknown(json.where(), "String or Regex", shown(json.data()));
    }
  }
  explicit Pattern(const std::string& regex) : regex_(std::make_shared<Regex>(regex, "tokenizer")) {}

  std::vector<Part> parts(const std::string& text) const {
    if (regex_ != nullptr) return regex_->parts(text);
    std::vector<Part> found;
    std::size_t done = 0;
    for (std::size_t at = 0; !text_.empty() && (at = text.find(text_, done)) != std::string::npos;) {
      if (at > done) found.push_back({done, at, false});
      done = at + text_.size();
      found.push_back({at, done, true});
    }
    if (done < text.size()) found.push_back({done, text.size(), false});
    return found;
  }

  std::string replace(const std::string& text, const std::string& by) const {
    std::string out;
    for (const Part& part : parts(text)) {
      if (part.match) {
        out += by;
      } else {
        out.append(text, part.begin, part.end - part.begin);
      }
      if (out.size() > kMostText) unknown("tokenizer", "replacements that leave at most 4 MiB of text", "more");
    }
    return out;
  }

 private:
  std::shared_ptr<Regex> regex_;
  std::string text_;
};

}  // namespace pi2::runner
