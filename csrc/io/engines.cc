// The list of read engines, by name.
#include <array>

#include "pi2/read_engine.h"

namespace pi2 {
namespace {

struct Known {
  const char* name;
  std::unique_ptr<ReadEngine> (*open)(int descriptor, int depth, ReadDone done, std::string* why);
};

constexpr std::array kKnown = {
#define PI2_READ_ENGINE(name, open) Known{name, open},
#include "io/engines.inc"
#undef PI2_READ_ENGINE
};

}  // namespace

std::vector<std::string> read_engines() {
  std::vector<std::string> names;
  for (const Known& each : kKnown) names.emplace_back(each.name);
  return names;
}

std::string read_engine_choices(const char* before, const char* after) {
  std::vector<std::string> names = read_engines();
  if (before != nullptr) names.insert(names.begin(), before);
  if (after != nullptr) names.emplace_back(after);
  std::string all;
  for (std::size_t i = 0; i < names.size(); ++i)
    all += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + names[i];
  return all;
}

bool is_read_engine(const std::string& name) {
  for (const Known& each : kKnown)
    if (name == each.name) return true;
  return false;
}

std::unique_ptr<ReadEngine> open_read_engine(const std::string& name, int descriptor, int depth, ReadDone done,
                                             std::string* why) {
  for (const Known& each : kKnown)
    if (name == each.name) return each.open(descriptor, depth, done, why);
  if (why != nullptr) *why = "no engine of that name";
  return nullptr;
}

}  // namespace pi2
