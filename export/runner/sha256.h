// SHA-256 (FIPS 180-4).
#pragma once

#include <string>

#include "files.h"

namespace pi2::runner {

// The hash of a file as 64 hexadecimal digits. Throws Problem if it cannot be read.
std::string sha256_of(const RegularFile& file);

}  // namespace pi2::runner
