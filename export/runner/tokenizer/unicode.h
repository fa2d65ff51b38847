// Unicode's normal forms (Unicode Standard Annex 15).
#pragma once

#include <string>

namespace pi2::runner {

// NFC or NFD of UTF-8; with `compatibility` NFKC or NFKD.
std::string normal_form(const std::string& text, bool compatibility, bool composed);

}  // namespace pi2::runner
