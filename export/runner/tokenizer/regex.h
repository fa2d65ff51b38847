// Regular expressions by Oniguruma, which Hugging Face's tokenizers use, so that patterns have the same meaning.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

struct re_pattern_buffer;

namespace pi2::runner {

// A part of a text, and whether the pattern matches it.
struct Part {
  std::size_t begin, end;
  bool match;
};

class Regex {
 public:
  // Throws Problem, beginning with `where`, for an invalid pattern.
  Regex(const std::string& pattern, const std::string& where);

  // All parts of the text in order, matches and the text between. Throws Problem if matching takes too many steps.
  std::vector<Part> parts(std::string_view text) const;

 private:
  struct Free {
    void operator()(re_pattern_buffer* regex) const;
  };
  std::unique_ptr<re_pattern_buffer, Free> regex_;
  std::string where_;
};

}  // namespace pi2::runner
