// Unicode's normal forms (Unicode Standard Annex 15).
#pragma once

#include <string>

namespace pi2::runner {

// NFC, NFD, or with `compatibility` NFKC, NFKD, of UTF-8.
std::string normal_form(const std::string& text, bool compatibility, bool composed);

}  // namespace pi2::runner
