// What a run found, for programs and for people.
#pragma once

#include <string>

#include "cpus.h"
#include "generate.h"
#include "memory.h"
#include "options.h"

namespace pi2::runner {

struct Run {
  Options options;
  Manifest manifest;
  Generated generated;
  std::int64_t prompt_tokens = 0;
  std::int64_t cache_bytes = 0;  // of the budget, for neurons; 0: no budget
  double load_seconds = 0;
  int threads = 0;
  Roles cpus;
  Memory memory;  // when the last token was chosen
};

Json report(const Run& run);          // the fields of torch-pi2 run --json, and more
std::string summary(const Run& run);  // one line

}  // namespace pi2::runner
