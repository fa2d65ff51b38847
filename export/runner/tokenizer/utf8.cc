#include "tokenizer/utf8.h"

namespace pi2::runner {

CodePoint code_point(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(at);
  if (lead < 0x80) return {lead, 1, true};
  // How many bytes follow, and the range of the first of them: this excludes overlong forms, surrogates and values past
  // U+10FFFF.
  std::size_t more = 0;
  unsigned low = 0x80, high = 0xbf;
  char32_t value = 0;
  if (lead >= 0xc2 && lead <= 0xdf) {
    more = 1, value = lead & 0x1f;
  } else if (lead >= 0xe0 && lead <= 0xef) {
    more = 2, value = lead & 0x0f;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;
  } else if (lead >= 0xf0 && lead <= 0xf4) {
    more = 3, value = lead & 0x07;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
  } else {
    return {0xfffd, 1, false};
  }
  for (std::size_t i = 1; i <= more; ++i) {
    if (at + i >= text.size() || byte(at + i) < low || byte(at + i) > high) return {0xfffd, i, false};
    value = value << 6 | (byte(at + i) & 0x3f);
    low = 0x80, high = 0xbf;
  }
  return {value, more + 1, true};
}

void append(std::string& text, char32_t value) {
  const auto tail = [&](int shift) { text += static_cast<char>(0x80 | (value >> shift & 0x3f)); };
  if (value < 0x80) {
    text += static_cast<char>(value);
  } else if (value < 0x800) {
    text += static_cast<char>(0xc0 | value >> 6), tail(0);
  } else if (value < 0x10000) {
    text += static_cast<char>(0xe0 | value >> 12), tail(6), tail(0);
  } else {
    text += static_cast<char>(0xf0 | value >> 18), tail(12), tail(6), tail(0);
  }
}

bool is_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const CodePoint point = code_point(text, at);
    if (!point.valid) return false;
    at += point.bytes;
  }
  return true;
}

std::string repaired(std::string_view bytes) { return utf8(code_points(bytes)); }

std::u32string code_points(std::string_view text) {
  std::u32string points;
  points.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const CodePoint point = code_point(text, at);
    points += point.value;
    at += point.bytes;
  }
  return points;
}

std::string utf8(std::u32string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (const char32_t point : text) append(bytes, point);
  return bytes;
}

}  // namespace pi2::runner
