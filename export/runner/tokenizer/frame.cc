#include "tokenizer/parts.h"

namespace pi2::runner {
namespace {

constexpr std::size_t kMost = 1024;  // ids; models have one or two

const Frame& checked(const Frame& frame, const std::string& where) {
  const std::size_t count = frame.before.size() + frame.behind.size();
  if (count > kMost)
    unknown(where, "at most " + std::to_string(kMost) + " tokens around a text", std::to_string(count));
  return frame;
}

}  // namespace

Frame make_frame(const Json& json, const std::string& where) {
  if (json.is_null()) return {};
  const Fields fields(json, where);
  const std::string& type = fields.text("type");
  if (type == "ByteLevel") return {};  // it only changes offsets, which are not used here
  if (type == "Sequence") {
    Frame all;
    for (const Json& step : fields.list("processors")) {
      const Frame one = make_frame(step, where);
      all.before.insert(all.before.begin(), one.before.begin(), one.before.end());
      all.behind.insert(all.behind.end(), one.behind.begin(), one.behind.end());
      checked(all, where);  // each time: this is quadratic
    }
    return all;
  }
  if (type != "TemplateProcessing") unknown(where, "ByteLevel, TemplateProcessing or Sequence", type);
  Frame frame;
  bool behind = false;
  const Fields special = fields.sub("special_tokens");
  for (const Json& piece : fields.list("single")) {
    if (piece.contains("Sequence")) {
      if (behind) unknown(where, "a template with the text once", shown(piece));
      behind = true;
      continue;
    }
    const std::string& name = Fields(piece, where).sub("SpecialToken").text("id");
    for (const std::int64_t id : special.sub(name.c_str()).numbers("ids")) {
      (behind ? frame.behind : frame.before).push_back(id);
    }
  }
  return checked(frame, where);
}

}  // namespace pi2::runner
