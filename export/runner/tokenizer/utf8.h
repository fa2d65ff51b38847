// Text as code points.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pi2::runner {

struct CodePoint {
  char32_t value;     // U+FFFD where the bytes are no UTF-8
  std::size_t bytes;  // that it takes; of what is no UTF-8, its maximal part that something valid could begin with
  bool valid;
};

// At `at` < text.size().
CodePoint code_point(std::string_view text, std::size_t at);
void append(std::string& text, char32_t value);
bool is_utf8(std::string_view text);
// With U+FFFD for every part that is no UTF-8.
std::string repaired(std::string_view bytes);
std::u32string code_points(std::string_view text);
std::string utf8(std::u32string_view text);

}  // namespace pi2::runner
