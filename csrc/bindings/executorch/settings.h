// Options of the backend: those of a load override those of the process, which override the environment.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "bindings/executorch/fault.h"

namespace pi2::et {

struct Settings {
  std::string store_path;         // the store, or the folder that it is in; "": the blob's file name
  std::int64_t cache_bytes = -1;  // -1: room for every neuron
  int threads = 0;                // for submitted layers; 0: as many as ExecuTorch's pool
  int io_threads = 64;
  std::string engine = "auto";  // io_uring if available, else pread
  std::string policy = "lfu";
  bool direct = true;
  bool preload = true;
  std::string trace;  // file; "": none

  // Stores opened with different settings are not shared.
  std::string text() const;
};

// Values by key, as in pi2_et_set.
using Options = std::map<std::string, std::string>;

// Sets the setting of `key`.
Problem change(Settings* settings, const std::string& key, const std::string& value);

// For programs loaded from now on; "": back to the default.
Problem set_option(const std::string& key, const std::string& value);

// The environment, overridden by set_option, overridden by `options`.
Problem current_settings(const Options& options, Settings* settings);

}  // namespace pi2::et
