// Values of JSON files, with their types checked.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "problem.h"

namespace pi2::runner {

using Json = nlohmann::json;

// The whole file. Throws Problem: it cannot be read, or it is no JSON.
Json read_json(const std::filesystem::path& file);

// One JSON object; `where` begins what messages say of it.
class Fields {
 public:
  Fields(const Json& data, std::string where);

  const std::string& where() const { return where_; }
  bool has(const char* name) const { return data_->contains(name) && !(*data_)[name].is_null(); }
  // Each throws Problem: there is none, or it is of another type.
  const std::string& text(const char* name) const;
  std::int64_t number(const char* name) const;  // 0 to 2^53
  bool flag(const char* name, bool otherwise) const;
  const Json& list(const char* name) const;
  Fields sub(const char* name) const;
  std::vector<std::int64_t> numbers(const char* name) const;
  const Json& data() const { return *data_; }

 private:
  const Json& at(const char* name, const char* expected, bool (*fits)(const Json&)) const;

  const Json* data_;
  std::string where_;
};

// A value in a message: as JSON, cut where it is long.
std::string shown(const Json& value);

}  // namespace pi2::runner
