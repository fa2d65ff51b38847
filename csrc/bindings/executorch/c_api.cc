#include <algorithm>
#include <cstring>
#include <mutex>

#include "bindings/executorch/settings.h"
#include "bindings/executorch/store.h"
#include "pi2/executorch.h"

namespace pi2::et {
namespace {

std::mutex mutex;
std::string& last() {
  static auto* const text = new std::string();  // never destroyed: see stores
  return *text;
}

}  // namespace

void remember(const Problem& problem) noexcept {
  const std::lock_guard<std::mutex> lock(mutex);
  try {
    last() = problem.text;
  } catch (...) {
    last() = kNoMemory;  // short enough to allocate nothing
  }
}

}  // namespace pi2::et

extern "C" {

int pi2_et_abi(void) { return 1; }

int pi2_et_set(const char* key, const char* value) {
  const pi2::et::Problem wrong = pi2::et::guarded("an option of Pi2Backend", [&] {
    return pi2::et::set_option(key == nullptr ? "" : key, value == nullptr ? "" : value);
  });
  if (!wrong) return 0;
  pi2::et::remember(wrong);
  return -1;
}

const char* pi2_et_error(void) {
  thread_local std::string copy;
  const std::lock_guard<std::mutex> lock(pi2::et::mutex);
  try {
    copy = pi2::et::last();
  } catch (...) {
    return pi2::et::kNoMemory;
  }
  return copy.c_str();
}

void pi2_et_clear_error(void) { pi2::et::remember({}); }

int64_t pi2_et_stats(char* json, int64_t capacity, int reset) {
  std::string text;
  const pi2::et::Problem wrong = pi2::et::guarded("figures of the stores", [&] {
    text = pi2::et::all_stats(false);
    const bool fits = json != nullptr && static_cast<int64_t>(text.size()) < capacity;
    if (fits && reset != 0) text = pi2::et::all_stats(true);  // a call in between may have made it longer
    return pi2::et::Problem();
  });
  if (wrong) {
    pi2::et::remember(wrong);
    return -1;
  }
  if (json != nullptr && capacity > 0) {
    const auto most = static_cast<std::size_t>(capacity - 1);
    const std::size_t n = std::min(text.size(), most);
    std::memcpy(json, text.data(), n);
    json[n] = 0;
  }
  return static_cast<int64_t>(text.size()) + 1;
}

}  // extern "C"
