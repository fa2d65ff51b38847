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
  std::string prompt, system;  // text; with `chat`: question and system message
  bool chat = false;
  std::vector<Message> messages;     // of a chat, instead of `prompt` and `system`
  bool empty_system = false;         // there is an empty system message; otherwise an empty `system` means none
  std::vector<std::string> prompts;  // several prompts of one request
  Request request;                   // its prompt: --ids
  bool goes_on = false;              // reuses the common prefix of the last prompt and answer
  bool streams = false;              // streams the text of a request
  std::string requests;              // a file, one request per line; "-": standard input
  std::string http;                  // [HOST:]PORT to serve OpenAI's API on
  bool talks = false;                // a chat with questions from standard input
  int repeat = 0, warm_up = 1;       // measured and warm-up rounds of one prompt; 0: no measurement
  std::int64_t budget = -1;          // bytes for the whole process; -1: unlimited
  int threads = 0;                   // 0: ExecuTorch's default
  std::string cpus, compute_cpus, read_cpus;  // see roles_of
  std::string io_threads, engine, policy, store, trace, etdump, logits;
  std::vector<std::string> backends;  // libraries to load before the program
  Verify verify = Verify::kChecksums;
  bool json = false, help = false;
};

extern const char* const kUsage;

// Throws Problem with the name of the option.
Options parse_options(int argc, char** argv);

// "2.5GiB", "700MB", "1G" (decimal) or a number of bytes. Throws Problem.
std::int64_t parse_bytes(const std::string& text);

}  // namespace pi2::runner
