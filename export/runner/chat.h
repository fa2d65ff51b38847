// A question as the model's chat template writes it.
#pragma once

#include <string>

#include "fields.h"

namespace pi2::runner {

// With chat.json of the bundle, which the exporter has made with the template (export/chat.py); no template language is
// needed here. `where` begins messages, `system` may be null: nothing
// is said. Throws Problem: the template takes no system message, or
// the file is damaged.
std::string chat_text(const Json& json, const std::string& where, const std::string& user, const std::string* system);

}  // namespace pi2::runner
