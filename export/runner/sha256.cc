#include "sha256.h"

#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

namespace pi2::runner {
namespace {

// The constants are the first 32 bits of the fractional parts of square and cube roots of primes.
struct Constants {
  std::uint32_t start[8], round[64];

  Constants() {
    int found = 0;
    for (std::uint32_t n = 2; found < 64; ++n) {
      bool prime = true;
      for (std::uint32_t d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
      if (!prime) continue;
      if (found < 8) start[found] = fraction(n, 2);
      round[found++] = fraction(n, 3);
    }
  }

 private:
  // The first 32 fractional bits of the root of `n`, exactly: the largest r with r^power <= n * 2^(32 power).
  static std::uint32_t fraction(std::uint32_t n, int power) {
    using Wide = unsigned __int128;
    std::uint64_t low = 0, high = std::uint64_t{1} << 37;  // roots of the first 64 primes are below 2^5
    while (high - low > 1) {
      const std::uint64_t middle = low + (high - low) / 2;
      // middle^power <= n << 32 power, without its 111 bits and more: cubes are compared after a division
      const Wide square = static_cast<Wide>(middle) * middle;
      const bool fits =
          power == 2 ? square <= static_cast<Wide>(n) << 64 : square <= (static_cast<Wide>(n) << 96) / middle;
      (fits ? low : high) = middle;
    }
    return static_cast<std::uint32_t>(low);
  }
};

class Sha256 {
 public:
  Sha256() { std::memcpy(state_, constants().start, sizeof state_); }

  void block(const unsigned char* bytes) {
    std::uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      w[i] = static_cast<std::uint32_t>(bytes[4 * i]) << 24 | bytes[4 * i + 1] << 16 | bytes[4 * i + 2] << 8 |
             bytes[4 * i + 3];
    }
    for (int i = 16; i < 64; ++i) {
      const std::uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + w[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) +
             (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    std::uint32_t s[8];
    std::memcpy(s, state_, sizeof s);
    for (int i = 0; i < 64; ++i) {
      const std::uint32_t e = s[4], a = s[0];
      const std::uint32_t one = s[7] + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                                ((e & s[5]) ^ (~e & s[6])) + constants().round[i] + w[i];
      const std::uint32_t two =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
      std::memmove(s + 1, s, 7 * sizeof *s);
      s[4] += one;
      s[0] = one + two;
    }
    for (int i = 0; i < 8; ++i) state_[i] += s[i];
  }

  std::string hex() const {
    char text[65];
    for (int i = 0; i < 8; ++i) std::snprintf(text + 8 * i, 9, "%08x", state_[i]);
    return text;
  }

 private:
  static const Constants& constants() {
    static const Constants all;
    return all;
  }
  std::uint32_t state_[8];
};

}  // namespace

std::string sha256_of(const RegularFile& file) {
  Sha256 sha;
  std::uint64_t total = 0;
  std::string rest;  // less than a block
  file.read([&](std::string_view piece) {
    total += piece.size();
    rest += piece;
    std::size_t at = 0;
    for (; at + 64 <= rest.size(); at += 64) sha.block(reinterpret_cast<const unsigned char*>(rest.data()) + at);
    rest.erase(0, at);
  });
  // The last blocks: a 1 bit, zeros, and the length in bits.
  unsigned char tail[128] = {};
  const std::size_t bytes = rest.size() < 56 ? 64 : 128;
  std::memcpy(tail, rest.data(), rest.size());
  tail[rest.size()] = 0x80;
  for (int i = 0; i < 8; ++i) tail[bytes - 1 - i] = static_cast<unsigned char>(total * 8 >> 8 * i);
  for (std::size_t done = 0; done < bytes; done += 64) sha.block(tail + done);
  return sha.hex();
}

}  // namespace pi2::runner
