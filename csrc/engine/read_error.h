// Why a read, or a call, failed. Allocates nothing, since an I/O thread may have no memory; the thread that waits for
// the read makes the message.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace pi2 {

struct ReadError {
  const char* why = nullptr;  // null: no error
  int error = 0;              // errno, instead of `why`
  std::int64_t layer = -1, neuron = -1, bytes = 0, offset = 0;

  explicit operator bool() const { return why != nullptr || error != 0; }

  std::string message() const {
    if (!*this || layer < 0) return why == nullptr ? "" : why;
    return "layer " + std::to_string(layer) + ", neuron " + std::to_string(neuron) +
           (bytes > 0 ? ", " + std::to_string(bytes) + " bytes" : "") + " at " + std::to_string(offset) + ": " +
           (error != 0 ? std::strerror(error) : why);
  }
};

constexpr ReadError kNoMemory{"no memory"};

}  // namespace pi2
