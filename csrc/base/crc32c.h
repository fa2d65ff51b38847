// CRC32C (Castagnoli), as iSCSI, ext4 and x86's own instruction compute it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pi2 {

// `before`: the checksum of the bytes that come before, if these are not the first.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t before = 0);

// The same by table: where there is no instruction, and the reference of the other.
std::uint32_t crc32c_by_table(const void* data, std::size_t bytes, std::uint32_t before = 0);

}  // namespace pi2
