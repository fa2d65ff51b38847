// Errors: a code for the program and a message for the log.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <system_error>
#include <utility>

namespace pi2::et {

// backend.cc translates these to ExecuTorch's errors.
enum class Fault {
  kNone,
  kProgram,       // the blob is damaged
  kIncompatible,  // valid, but for another version of the library or another store
  kAccess,        // a file is missing, truncated or damaged, or a read failed
  kArgument,      // an invalid option or tensor
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

// Short enough for std::string to allocate nothing.
constexpr const char* kNoMemory = "out of memory";

inline Problem no_memory(const std::string& what) noexcept {
  try {
    return problem(Fault::kMemory, what, "memory for it", "none", "Give the process more, or the cache less.");
  } catch (...) {
    return {Fault::kMemory, kNoMemory};
  }
}

// Runs `body`, which returns a Problem, and catches everything: nothing may be thrown into C, or into ExecuTorch, which
// may be built without exceptions.
template <class Body>
Problem guarded(const char* what, const Body& body) noexcept {
  try {
    try {
      return body();
    } catch (const std::bad_alloc&) {
      return no_memory(what);
    } catch (const std::exception& error) {
      const auto* system = dynamic_cast<const std::system_error*>(&error);
      if (system != nullptr && system->code() == std::errc::resource_unavailable_try_again)
        return problem(Fault::kMemory, what, "threads that can be started", error.what(),
                       "Use fewer (io_threads), or give the process more memory and threads.");
      return problem(Fault::kState, what, "no exception", error.what(), "This is a fault of torch_pi2: report it.");
    }
  } catch (...) {  // building the text failed, too
    return {Fault::kMemory, kNoMemory};
  }
}

// Sets the text of pi2_et_error. Thread-safe.
void remember(const Problem& problem) noexcept;

}  // namespace pi2::et
