// What went wrong, for a program that passes on numbers and for whoever reads its log.
#pragma once

#include <string>
#include <utility>

namespace pi2::et {

// In words of ExecuTorch's errors, which backend.cc translates it to.
enum class Fault {
  kNone,
  kProgram,       // the blob is damaged
  kIncompatible,  // sound, but not of this library or of the store at hand
  kAccess,        // missing, cut short, damaged, or reading has failed
  kArgument,      // an option or a tensor
  kState,         // calls that do not belong together
  kMemory,
};

struct Problem {
  Fault fault = Fault::kNone;
  std::string text;  // "what: expected ..., found .... what to do"

  explicit operator bool() const { return fault != Fault::kNone; }
};

inline Problem problem(Fault fault, const std::string& what, const std::string& expected, const std::string& found,
                       const std::string& fix) {
  return {fault, what + ": expected " + expected + ", found " + found + ". " + fix};
}

inline Problem no_memory(const std::string& what) {
  return problem(Fault::kMemory, what, "memory for it", "none", "Give the process more, or the cache less.");
}

// What pi2_et_error says. Any thread.
void remember(const Problem& problem);

}  // namespace pi2::et
