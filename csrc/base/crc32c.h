// CRC32C (Castagnoli), as in iSCSI, ext4 and the x86 instruction.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pi2 {

// `before`: the checksum of the preceding bytes, if any.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t before = 0);

// The same by table: for CPUs without the instruction, and as its reference.
std::uint32_t crc32c_by_table(const void* data, std::size_t bytes, std::uint32_t before = 0);

}  // namespace pi2
