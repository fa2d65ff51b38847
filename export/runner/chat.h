// A talk as the model's chat template writes it.
#pragma once

#include <string>
#include <vector>

#include "fields.h"

namespace pi2::runner {

struct Message {
  std::string role, content;  // "system", "user" or "assistant"
};

// A question, or questions and answers by turns up to the next question; a system message may be the first. With
// chat.json of the bundle, which the exporter has made with the template (export/text.py): no template language is
// needed here. `where` begins messages. Throws Problem: other roles, the template takes no system message or does more
// with answers than to write them, or the file is damaged.
std::string chat_text(const Json& json, const std::string& where, const std::vector<Message>& messages);

}  // namespace pi2::runner
