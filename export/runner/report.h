// The report of a run: JSON and text.
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
  std::int64_t cache_bytes = 0;  // part of the budget for neurons; 0: no budget
  double load_seconds = 0;
  int threads = 0;
  Roles cpus;
  Memory memory;  // after the last token
};

Json report(const Run& run);          // the fields of torch-pi2 run --json and further ones
std::string summary(const Run& run);  // one line

}  // namespace pi2::runner
