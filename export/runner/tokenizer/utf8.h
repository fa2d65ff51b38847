// Text as code points.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pi2::runner {

struct CodePoint {
  char32_t value;     // U+FFFD for invalid UTF-8
  std::size_t bytes;  // its length; for invalid UTF-8, the longest prefix of a valid sequence
  bool valid;
};

// The code point at `at` < text.size().
CodePoint code_point(std::string_view text, std::size_t at);
void append(std::string& text, char32_t value);
bool is_utf8(std::string_view text);
// Replaces every invalid part by U+FFFD.
std::string repaired(std::string_view bytes);
std::u32string code_points(std::string_view text);
std::string utf8(std::u32string_view text);

}  // namespace pi2::runner
