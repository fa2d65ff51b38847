// manifest.json of a bundle (docs/BUNDLE.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace pi2::runner {

struct Manifest {
  std::string target, model;
  std::string executorch;  // version that made the program; empty: not said
  std::string linears;     // how linear layers are stored
  std::int64_t vocab = 0;
  std::int64_t max_tokens = 0;     // prompt and answer together
  std::int64_t prompt_tokens = 0;  // of one call of prefill
  std::vector<int> batches;        // of the methods decode_bN, ascending
  int lanes = 0;                   // sequences at once
  std::vector<std::int64_t> eos;
  std::int64_t ffn_bytes = 0, store_bytes = 0;    // neurons of the store; all of it
  std::int64_t fixed_bytes = 0, token_bytes = 0;  // memory without the neuron cache; neurons that a token wants
};

// Reads it and compares the files of the folder with it: their sizes, with `hashes` also their SHA-256; `store`, if not
// empty, is looked at instead of the folder's model.pi2. Throws Problem, which names the file.
Manifest open_bundle(const std::filesystem::path& folder, const std::filesystem::path& store, bool hashes);

}  // namespace pi2::runner
