// A question as the model's chat template writes it.
#pragma once

#include <filesystem>
#include <string>

namespace pi2::runner {

// With chat.json of the bundle, which the exporter has made with the template (export/chat.py); no template language is
// needed here. `system` may be empty. Throws Problem: there is none, or the template takes no system message.
std::string chat_text(const std::filesystem::path& folder, const std::string& user, const std::string& system);

}  // namespace pi2::runner
