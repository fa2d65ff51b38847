// GPT-2's mapping of bytes to visible characters.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "tokenizer/utf8.h"

namespace pi2::runner {

// The character of each byte: itself if it is visible in Latin-1, else one from U+0100 on.
constexpr std::array<char32_t, 256> byte_characters() {
  std::array<char32_t, 256> to{};
  char32_t next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool seen = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    to[byte] = seen ? byte : next++;
  }
  return to;
}

inline std::string bytes_as_characters(std::string_view text) {
  static constexpr auto kTo = byte_characters();
  std::string out;
  out.reserve(2 * text.size());
  for (const char byte : text) append(out, kTo[static_cast<unsigned char>(byte)]);
  return out;
}

// The inverse; a text with other characters is returned unchanged.
inline std::string characters_as_bytes(const std::string& text) {
  static constexpr auto kFrom = [] {
    std::array<std::int16_t, 0x180> from{};
    from.fill(-1);
    const auto to = byte_characters();
    for (std::size_t byte = 0; byte < 256; ++byte) from[to[byte]] = static_cast<std::int16_t>(byte);
    return from;
  }();
  std::string out;
  for (const char32_t point : code_points(text)) {
    if (point >= kFrom.size() || kFrom[point] < 0) return text;
    out += static_cast<char>(kFrom[point]);
  }
  return out;
}

}  // namespace pi2::runner
