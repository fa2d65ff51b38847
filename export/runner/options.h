// The command line.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "generate.h"

namespace pi2::runner {

struct Options {
  std::string bundle;
  std::string prompt, system;  // text; with `chat` a question and what the system says before it
  bool chat = false;
  bool empty_system = false;  // the system says nothing, but speaks; else an empty `system` is none
  Request request;            // its prompt: of --ids
  std::int64_t budget = -1;   // bytes of the whole process; -1: everything fits
  int threads = 0;            // 0: ExecuTorch's choice
  std::string io_threads, engine, policy, store, trace, etdump, logits;
  std::vector<std::string> backends;  // libraries to load before the program
  Verify verify = Verify::kChecksums;
  bool json = false, help = false;
};

extern const char* const kUsage;

// Throws Problem, which names the option.
Options parse_options(int argc, char** argv);

// "2.5GiB", "700MB", "1G" (decimal) or a number of bytes. Throws Problem.
std::int64_t parse_bytes(const std::string& text);

}  // namespace pi2::runner
