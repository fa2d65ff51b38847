// Renders a chat by the model's chat template.
#pragma once

#include <string>
#include <vector>

#include "fields.h"

namespace pi2::runner {

struct Message {
  std::string role, content;  // "system", "user" or "assistant"
};

// Renders a question, or alternating questions and answers that end with a question; the first message may be a system
// message. Uses the bundle's chat.json, which the exporter derives from the template (export/text.py), so that no
// template language is needed here. `where` begins error messages. Throws Problem for other roles, if the template
// takes no system message or rewrites earlier answers, or if the file is damaged.
std::string chat_text(const Json& json, const std::string& where, const std::vector<Message>& messages);

}  // namespace pi2::runner
