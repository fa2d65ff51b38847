// The command line.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "chat.h"
#include "generate.h"

namespace pi2::runner {

struct Options {
  std::string bundle;
  std::string prompt, system;  // text; with `chat` a question and what the system says before it
  bool chat = false;
  std::vector<Message> messages;              // of a talk, instead of `prompt` and `system`
  bool empty_system = false;                  // the system says nothing, but speaks; else an empty `system` is none
  std::vector<std::string> prompts;           // of a request, several together
  Request request;                            // its prompt: of --ids
  bool goes_on = false;                       // what an earlier answer's prompt and it begin with is not read again
  bool streams = false;                       // text of a request, piece by piece
  std::string requests;                       // a file of them, a line each; "-": standard input
  std::string http;                           // [HOST:]PORT: requests of OpenAI's API come there
  bool talks = false;                         // questions are lines of standard input
  int repeat = 0, warm_up = 1;                // measured and unmeasured rounds of one prompt; 0: no measuring
  std::int64_t budget = -1;                   // bytes of the whole process; -1: everything fits
  int threads = 0;                            // 0: ExecuTorch's choice
  std::string cpus, compute_cpus, read_cpus;  // as roles_of has them
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
