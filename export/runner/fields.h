// Typed access to the values of JSON files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "problem.h"

namespace pi2::runner {

using Json = nlohmann::json;

// Limit for manifest.json and chat.json, which have a few thousand values: JSON in memory takes up to 22 times its
// text.
constexpr std::int64_t kMostSmall = 1 << 20;

// `where` begins error messages, `fix` is their advice (default: get an undamaged bundle). Throws Problem for invalid
// JSON, too many values, or nesting too deep for recursion.
Json parse_json(std::string_view text, const std::string& where, const char* fix = nullptr,
                std::int64_t most_values = std::numeric_limits<std::int64_t>::max());
// Parses a file. Throws Problem if it cannot be read or has more than `most` bytes, and as parse_json.
Json read_json(const std::filesystem::path& file, std::int64_t most);

// One JSON object; `where` begins its error messages.
class Fields {
 public:
  // `fix`: see parse_json.
  Fields(const Json& data, std::string where, const char* fix = nullptr);

  const std::string& where() const { return where_; }
  bool has(const char* name) const { return data_->contains(name) && !(*data_)[name].is_null(); }
  // Each throws Problem if the field is missing or has another type.
  const std::string& text(const char* name) const;
  std::int64_t number(const char* name) const;  // 0 to 2^53
  double real(const char* name) const;
  bool flag(const char* name, bool otherwise) const;
  const Json& list(const char* name) const;
  Fields sub(const char* name) const;
  std::vector<std::int64_t> numbers(const char* name) const;
  std::vector<std::string> texts(const char* name) const;  // or a single one; no empty ones
  const Json& data() const { return *data_; }

 private:
  const Json& at(const char* name, const char* expected, bool (*fits)(const Json&)) const;

  const Json* data_;
  std::string where_;
  const char* fix_;
};

// A value as one line of JSON.
std::string line_of(const Json& value);
// A value for a message: JSON, shortened if long.
std::string shown(const Json& value);

}  // namespace pi2::runner
