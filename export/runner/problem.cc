#include "problem.h"

#include "tokenizer/utf8.h"

namespace pi2::runner {

std::string printable(const std::string& text, std::size_t most) {
  std::size_t bytes = text.size();
  if (bytes > most) {
    for (bytes = most - 3; bytes > 0 && (text[bytes] & 0xc0) == 0x80;) --bytes;  // not inside a character
  }
  std::string out = repaired(std::string_view(text).substr(0, bytes)) + (bytes < text.size() ? "..." : "");
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  return out;
}

}  // namespace pi2::runner
