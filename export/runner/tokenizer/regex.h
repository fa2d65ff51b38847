// Regular expressions by Oniguruma, which Hugging Face's tokenizers use: theirs mean here what they mean there.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

struct re_pattern_buffer;

namespace pi2::runner {

// A part of a text, and whether the pattern matched it.
struct Part {
  std::size_t begin, end;
  bool match;
};

class Regex {
 public:
  // Throws Problem, which begins with `where`: it is none.
  Regex(const std::string& pattern, const std::string& where);

  // All of the text in order, what matches and what is between. Throws Problem: matching it takes too much.
  std::vector<Part> parts(std::string_view text) const;

 private:
  struct Free {
    void operator()(re_pattern_buffer* regex) const;
  };
  std::unique_ptr<re_pattern_buffer, Free> regex_;
  std::string where_;
};

}  // namespace pi2::runner
