#include "tokenizer/unicode.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <tuple>

#include "tokenizer/utf8.h"

namespace pi2::runner {
namespace {

struct Decomposition {
  char32_t of;
  std::uint8_t compatibility;
  std::uint16_t first, count;  // in kPool
};
struct Composition {
  char32_t a, b, to;
};
struct CombiningClass {
  char32_t of;
  std::uint8_t value;
};
#include "unicode_tables.inc"

// Hangul syllables are composed of up to three letters arithmetically.
constexpr char32_t kS = 0xac00, kL = 0x1100, kV = 0x1161, kT = 0x11a7;
constexpr char32_t kLs = 19, kVs = 21, kTs = 28, kSs = kLs * kVs * kTs;

template <class Row, std::size_t N>
const Row* find(const Row (&rows)[N], char32_t of) {
  const Row* row =
      std::lower_bound(std::begin(rows), std::end(rows), of, [](const Row& a, char32_t value) { return a.of < value; });
  return row != std::end(rows) && row->of == of ? row : nullptr;
}

int combining(char32_t point) {
  const CombiningClass* row = point < 0x300 ? nullptr : find(kClasses, point);
  return row == nullptr ? 0 : row->value;
}

void decompose(char32_t point, bool compatibility, std::u32string& out) {
  if (point - kS < kSs) {
    const char32_t s = point - kS, t = s % kTs;
    out += kL + s / (kVs * kTs);
    out += kV + s % (kVs * kTs) / kTs;
    if (t != 0) out += kT + t;
    return;
  }
  const Decomposition* row = point < 0xa0 ? nullptr : find(kDecompositions, point);
  if (row == nullptr || (row->compatibility != 0 && !compatibility)) {
    out += point;
    return;
  }
  for (int i = 0; i < row->count; ++i) decompose(kPool[row->first + i], compatibility, out);
}

// 0: none.
char32_t compose(char32_t a, char32_t b) {
  if (a - kL < kLs && b - kV < kVs) return kS + ((a - kL) * kVs + (b - kV)) * kTs;
  if (a - kS < kSs && (a - kS) % kTs == 0 && b - kT - 1 < kTs - 1) return a + (b - kT);
  const auto less = [](const Composition& row, const std::pair<char32_t, char32_t>& of) {
    return std::tie(row.a, row.b) < std::tie(of.first, of.second);
  };
  const auto* row = std::lower_bound(std::begin(kCompositions), std::end(kCompositions), std::pair(a, b), less);
  return row != std::end(kCompositions) && row->a == a && row->b == b ? row->to : 0;
}

}  // namespace

std::string normal_form(const std::string& text, bool compatibility, bool composed) {
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<signed char>(c) >= 0; })) return text;
  std::u32string points;
  for (const char32_t point : code_points(text)) decompose(point, compatibility, points);
  // Sorts the marks of each base character by class.
  for (auto at = points.begin(); at != points.end();) {
    const auto end = std::find_if(at, points.end(), [](char32_t point) { return combining(point) == 0; });
    std::stable_sort(at, end, [](char32_t a, char32_t b) { return combining(a) < combining(b); });
    at = end == points.end() ? end : end + 1;
  }
  if (!composed) return utf8(points);
  std::u32string out;
  std::size_t base = std::u32string::npos;
  int last = 0;  // class of the last mark after base; 0: none
  for (const char32_t point : points) {
    const int its = combining(point);
    // A mark is blocked from its base by a mark of the same or a higher class between them.
    const bool reaches = base != std::u32string::npos && (last == 0 ? base + 1 == out.size() : last < its);
    if (const char32_t together = reaches ? compose(out[base], point) : 0; together != 0) {
      out[base] = together;
      continue;
    }
    if (its == 0) base = out.size();
    last = its;
    out += point;
  }
  return utf8(out);
}

}  // namespace pi2::runner
