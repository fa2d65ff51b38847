// SHA-256 (FIPS 180-4).
#pragma once

#include <filesystem>
#include <string>

namespace pi2::runner {

// Of a file, 64 hexadecimal digits. Throws Problem: it cannot be read.
std::string sha256_of(const std::filesystem::path& file);

}  // namespace pi2::runner
