#include "stops.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace pi2::runner {

std::string Stops::add(const std::string& piece) {
  if (reached_) return "";
  held_ += piece;
  // The stop string that is complete first, however the text is cut; of several, the one that begins first.
  constexpr auto kNone = std::pair(std::string::npos, std::string::npos);
  auto first = kNone;
  for (const std::string& stop : *strings_) {
    const std::size_t at = held_.find(stop);
    if (at != std::string::npos) first = std::min(first, std::pair(at + stop.size(), at));
  }
  if (first != kNone) {
    reached_ = true;
    held_.resize(first.second);
    return std::exchange(held_, "");
  }
  std::size_t begun = 0;  // bytes at the end that may begin a stop string
  for (const std::string& stop : *strings_) {
    for (std::size_t n = std::min(stop.size() - 1, held_.size()); n > begun; --n) {
      if (held_.ends_with(std::string_view(stop).substr(0, n))) begun = n;
    }
  }
  std::string certain = held_.substr(0, held_.size() - begun);
  held_.erase(0, certain.size());
  return certain;
}

std::string Stops::rest() { return std::exchange(held_, ""); }

}  // namespace pi2::runner
