// What is wrong with a read, or with a call: kept without memory, of which threads that read may have none. Whoever
// waits puts it into words.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace pi2 {

struct Wrong {
  const char* why = nullptr;  // null: nothing is
  int error = 0;              // errno, instead of `why`
  std::int64_t layer = -1, neuron = -1, bytes = 0, offset = 0;

  explicit operator bool() const { return why != nullptr || error != 0; }

  std::string words() const {
    if (!*this || layer < 0) return why == nullptr ? "" : why;
    return "layer " + std::to_string(layer) + ", neuron " + std::to_string(neuron) +
           (bytes > 0 ? ", " + std::to_string(bytes) + " bytes" : "") + " at " + std::to_string(offset) + ": " +
           (error != 0 ? std::strerror(error) : why);
  }
};

constexpr Wrong kNoMemory{"no memory"};

}  // namespace pi2
