// Options of the backend: those of one load over those of the process over the environment.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "bindings/executorch/fault.h"

namespace pi2::et {

struct Settings {
  std::string store_path;         // the store, or the folder that it is in; "": the blob's file name
  std::int64_t cache_bytes = -1;  // -1: room for every neuron
  int threads = 0;                // of submitted layers; 0: as many as ExecuTorch's pool has
  int io_threads = 64;
  std::string engine = "auto";  // io_uring where there is one, else pread
  std::string policy = "lfu";
  bool direct = true;
  bool preload = true;
  std::string trace;  // file; "": none

  // Stores opened with different ones are not shared.
  std::string text() const;
};

// Texts by key, as pi2_et_set takes them.
using Options = std::map<std::string, std::string>;

// Changes what `key` stands for.
Problem change(Settings* settings, const std::string& key, const std::string& value);

// For all that is loaded from now on; "": back to what it was.
Problem set_option(const std::string& key, const std::string& value);

// The environment, over it set_option's, over them `options`.
Problem current_settings(const Options& options, Settings* settings);

}  // namespace pi2::et
