#include "base/crc32c.h"

#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace pi2 {
namespace {

struct Table {
  std::uint32_t of[256];

  constexpr Table() : of() {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      std::uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
      of[byte] = crc;
    }
  }
};
constexpr Table kTable;

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t by_instruction(const char* p, std::size_t bytes, std::uint32_t before) {
  std::uint64_t crc = static_cast<std::uint32_t>(~before);
  for (; bytes >= 8; p += 8, bytes -= 8) {
    std::uint64_t word;
    std::memcpy(&word, p, 8);
    crc = _mm_crc32_u64(crc, word);
  }
  auto rest = static_cast<std::uint32_t>(crc);
  for (; bytes > 0; ++p, --bytes) rest = _mm_crc32_u8(rest, static_cast<unsigned char>(*p));
  return ~rest;
}

bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__) && defined(__linux__)
__attribute__((target("+crc"))) std::uint32_t by_instruction(const char* p, std::size_t bytes, std::uint32_t before) {
  std::uint32_t crc = ~before;
  for (; bytes >= 8; p += 8, bytes -= 8) {
    std::uint64_t word;
    std::memcpy(&word, p, 8);
    crc = __crc32cd(crc, word);
  }
  for (; bytes > 0; ++p, --bytes) crc = __crc32cb(crc, static_cast<unsigned char>(*p));
  return ~crc;
}

bool has_instruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#else
std::uint32_t by_instruction(const char* p, std::size_t bytes, std::uint32_t before) {
  return crc32c_by_table(p, bytes, before);
}

bool has_instruction() { return false; }
#endif

}  // namespace

std::uint32_t crc32c_by_table(const void* data, std::size_t bytes, std::uint32_t before) {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint32_t crc = ~before;
  for (; bytes > 0; ++p, --bytes) crc = (crc >> 8) ^ kTable.of[(crc ^ *p) & 0xff];
  return ~crc;
}

std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t before) {
  static const bool instruction = has_instruction();
  return instruction ? by_instruction(static_cast<const char*>(data), bytes, before)
                     : crc32c_by_table(data, bytes, before);
}

}  // namespace pi2
