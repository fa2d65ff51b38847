#include "tokenizer/parts.h"
#include "tokenizer/replace.h"
#include "tokenizer/unicode.h"

namespace pi2::runner {

void unknown(const std::string& where, const std::string& expected, const std::string& found) {
  throw Problem(where, expected, found,
                "This runner does not have it: use torch-pi2 run, or pass token ids with --ids.");
}

Normalize make_normalizer(const Json& json, const std::string& where) {
  if (json.is_null()) return [](std::string text) { return text; };
  const Fields fields(json, where);
  const std::string& type = fields.text("type");
  if (type == "Sequence") {
    std::vector<Normalize> steps;
    for (const Json& step : fields.list("normalizers")) steps.push_back(make_normalizer(step, where));
    return [steps = std::move(steps)](std::string text) {
      for (const Normalize& step : steps) text = step(std::move(text));
      return text;
    };
  }
  if (type == "Replace") {
    return [pattern = Pattern(fields.sub("pattern")), by = fields.text("content")](std::string text) {
      return pattern.replace(text, by);
    };
  }
  if (type == "Prepend") {
    return [what = fields.text("prepend")](std::string text) { return text.empty() ? text : what + text; };
  }
  if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
    const bool compatibility = type.size() == 4, composed = type.back() == 'C';
    return [=](const std::string& text) { return normal_form(text, compatibility, composed); };
  }
  unknown(where, "NFC, NFD, NFKC, NFKD, Prepend, Replace or Sequence", type);
}

}  // namespace pi2::runner
