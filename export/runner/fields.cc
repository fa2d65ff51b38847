#include "fields.h"

#include <algorithm>
#include <utility>

#include "files.h"

namespace pi2::runner {
namespace {

constexpr const char* kFix = "Copy the bundle again, or export it again with this version of torch_pi2.";

// The largest integer that every JSON reader represents exactly. Full 64-bit numbers could overflow in sums.
constexpr std::int64_t kMost = std::int64_t{1} << 53;

constexpr int kDeepest = 64;

// The expectation that JSON with too many or too deep values violates; "": none. For invalid JSON any result will do,
// because the parser refuses it.
std::string too_much(std::string_view text, std::int64_t most_values) {
  std::int64_t depth = 0, values = 1;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') ++i;
      if (c == '"') quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kDeepest) return std::to_string(kDeepest) + " levels";
      ++values;
    } else if (c == ']' || c == '}') {
      --depth;
    } else if (c == ',') {
      ++values;
    }
  }
  return values <= most_values ? "" : std::to_string(most_values) + " values";
}

bool is_whole(const Json& value) { return value.is_number_unsigned() && value.get<std::uint64_t>() <= kMost; }

}  // namespace

Json parse_json(std::string_view text, const std::string& where, const char* fix, std::int64_t most_values) {
  if (fix == nullptr) fix = kFix;
  if (const std::string most = too_much(text, most_values); !most.empty()) {
    throw Problem(where, "JSON of at most " + most, "more", fix);
  }
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    throw Problem(where, "JSON", error.what(), fix);
  }
}

Json read_json(const std::filesystem::path& file, std::int64_t most) {
  return parse_json(read_file(file, most), file.string());
}

std::string line_of(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"; }

std::string shown(const Json& value) {
  return printable(value.dump(-1, ' ', false, Json::error_handler_t::replace), 80);
}

Fields::Fields(const Json& data, std::string where, const char* fix)
    : data_(&data), where_(std::move(where)), fix_(fix == nullptr ? kFix : fix) {
  if (!data.is_object()) throw Problem(where_, "an object", shown(data), fix_);
}

const Json& Fields::at(const char* name, const char* expected, bool (*fits)(const Json&)) const {
  const auto found = data_->find(name);
  if (found == data_->end()) throw Problem(where_ + ", " + name, expected, "nothing", fix_);
  if (!fits(*found)) throw Problem(where_ + ", " + name, expected, shown(*found), fix_);
  return *found;
}

const std::string& Fields::text(const char* name) const {
  return at(name, "text", [](const Json& v) { return v.is_string(); }).get_ref<const std::string&>();
}

std::int64_t Fields::number(const char* name) const { return at(name, "a whole number, 0 to 2^53", is_whole); }

double Fields::real(const char* name) const {
  return at(name, "a number", [](const Json& v) { return v.is_number(); }).get<double>();
}

bool Fields::flag(const char* name, bool otherwise) const {
  return has(name) ? at(name, "true or false", [](const Json& v) { return v.is_boolean(); }).get<bool>() : otherwise;
}

const Json& Fields::list(const char* name) const {
  return at(name, "a list", [](const Json& v) { return v.is_array(); });
}

Fields Fields::sub(const char* name) const {
  return {at(name, "an object", [](const Json& v) { return v.is_object(); }), where_ + ", " + name, fix_};
}

std::vector<std::int64_t> Fields::numbers(const char* name) const {
  const Json& found = at(name, "a list of whole numbers, 0 to 2^53",
                         [](const Json& v) { return v.is_array() && std::all_of(v.begin(), v.end(), is_whole); });
  return found.get<std::vector<std::int64_t>>();
}

std::vector<std::string> Fields::texts(const char* name) const {
  const auto good = [](const Json& v) { return v.is_string() && !v.get_ref<const std::string&>().empty(); };
  const Json& found = (*data_)[name];
  const bool several = found.is_array() && std::all_of(found.begin(), found.end(), good);
  if (!several && !good(found)) {
    throw Problem(where_ + ", " + name, "text, or a list of texts, none of them empty", shown(found), fix_);
  }
  return several ? found.get<std::vector<std::string>>() : std::vector{found.get<std::string>()};
}

}  // namespace pi2::runner
