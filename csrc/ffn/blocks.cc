// Rows put into blocks (kernels.h): words of 16 rows, transposed four rows by four words at a time.
#include <cstring>
#include <vector>

#include "kernels/fetch_rows.h"
#include "pi2/kernels.h"
#include "pi2/linear.h"

namespace pi2 {
namespace {

using Words = std::int32_t __attribute__((vector_size(16)));
using Halves = std::int16_t __attribute__((vector_size(16)));
constexpr std::int64_t kWord = 4, kUnit = 16, kLine = 64;

// Four words at `at` of four rows, word by word: word w of row r is lane r of the vector w.
struct Square {
  Words a, b, c, d;

  Square(const void* const* rows, std::int64_t at, std::int64_t bytes = kUnit) : a{}, b{}, c{}, d{} {
    Words w0 = {}, w1 = {}, w2 = {}, w3 = {};
    const auto size = static_cast<std::size_t>(bytes);
    std::memcpy(&w0, static_cast<const char*>(rows[0]) + at, size);
    std::memcpy(&w1, static_cast<const char*>(rows[1]) + at, size);
    std::memcpy(&w2, static_cast<const char*>(rows[2]) + at, size);
    std::memcpy(&w3, static_cast<const char*>(rows[3]) + at, size);
    const Words low01 = __builtin_shufflevector(w0, w1, 0, 4, 1, 5);
    const Words low23 = __builtin_shufflevector(w2, w3, 0, 4, 1, 5);
    const Words high01 = __builtin_shufflevector(w0, w1, 2, 6, 3, 7);
    const Words high23 = __builtin_shufflevector(w2, w3, 2, 6, 3, 7);
    a = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
    b = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
    c = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
    d = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
  }
};

// First halves of four words, then second halves.
void put_scales(Words words, char* to) {
  Halves both;
  std::memcpy(&both, &words, sizeof(both));
  both = __builtin_shufflevector(both, both, 0, 2, 4, 6, 1, 3, 5, 7);
  std::memcpy(to, &both, 8);
  std::memcpy(to + 2 * kPanelRows, reinterpret_cast<const char*>(&both) + 8, 8);
}

// kUnits: of 16 bytes of a row, for every two groups.
template <std::int64_t kUnits, std::int32_t kSign>
void fill(const void* const* rows, std::int64_t pairs, const void* const* next, char* to) {
  constexpr std::int64_t kPair = kUnits * kUnit, kRun = kPanelRows * (kPair + kWord);
  const std::int64_t scales = pairs * kPair;
  for (std::int64_t p = 0; p < pairs; ++p) {
    for (std::int64_t r = 0; next != nullptr && p * kPair % kLine == 0 && r < kPanelRows; ++r)
      fetch(static_cast<const char*>(next[r]) + p * kPair);
    for (std::int64_t u = 0; u < kUnits; ++u) {
      for (std::int64_t r = 0; r < kPanelRows; r += 4) {
        const Square square(rows + r, p * kPair + u * kUnit);
        auto* at = to + p * kRun + u * kUnit * kPanelRows + r * kWord;
        const Words words[4] = {square.a ^ kSign, square.b ^ kSign, square.c ^ kSign, square.d ^ kSign};
        std::memcpy(at, words, kUnit);
        std::memcpy(at + kLine, words + 1, kUnit);
        std::memcpy(at + 2 * kLine, words + 2, kUnit);
        std::memcpy(at + 3 * kLine, words + 3, kUnit);
      }
    }
  }
  for (std::int64_t p = 0; p < pairs; p += 4) {
    const std::int64_t some = pairs - p < 4 ? pairs - p : 4;
    for (std::int64_t r = 0; r < kPanelRows; ++r)
      if (next != nullptr && p % (kLine / kWord) == 0) fetch(static_cast<const char*>(next[r]) + scales + p * kWord);
    for (std::int64_t r = 0; r < kPanelRows; r += 4) {
      const Square square =
          some == 4 ? Square(rows + r, scales + p * kWord) : Square(rows + r, scales + p * kWord, some * kWord);
      char* at = to + p * kRun + kPanelRows * kPair + 2 * r;
      put_scales(square.a, at);
      if (some > 1) put_scales(square.b, at + kRun);
      if (some > 2) put_scales(square.c, at + 2 * kRun);
      if (some > 3) put_scales(square.d, at + 3 * kRun);
    }
  }
}

}  // namespace

void to_block(const void* const* rows, DType dtype, std::int64_t columns, const void* const* next, void* block) {
  const std::int64_t pairs = groups(columns) / 2;
  if (dtype == DType::kQ4) return fill<2, 0>(rows, pairs, next, static_cast<char*>(block));
  fill<4, -0x7F7F7F80>(rows, pairs, next, static_cast<char*>(block));  // unsigned
}

void to_blocks(const void* rows, DType dtype, std::int64_t count, std::int64_t columns, void* blocks) {
  const std::int64_t bytes = row_bytes(dtype, columns);
  // In a block zero values with zero scales.
  std::vector<char> none(static_cast<std::size_t>(bytes), dtype == DType::kQ4 ? char{0} : static_cast<char>(128));
  std::memset(none.data() + bytes - 2 * groups(columns), 0, static_cast<std::size_t>(2 * groups(columns)));
  for (std::int64_t first = 0; first < count; first += kPanelRows) {
    const void* some[kPanelRows];
    for (std::int64_t r = 0; r < kPanelRows; ++r)
      some[r] = first + r < count ? static_cast<const char*>(rows) + (first + r) * bytes : none.data();
    to_block(some, dtype, columns, nullptr, static_cast<char*>(blocks) + first * bytes);
  }
}

}  // namespace pi2
