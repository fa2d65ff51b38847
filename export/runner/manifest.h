// manifest.json of a bundle (docs/BUNDLE.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace pi2::runner {

struct FileEntry {
  std::int64_t bytes = 0;
  std::uint32_t crc32c = 0;
  std::string sha256;
};

struct Manifest {
  std::string target, model;
  std::string executorch;  // version that made the program; empty: unknown
  std::string linears;     // how linear layers are stored
  std::int64_t vocab = 0;
  std::int64_t max_tokens = 0;         // prompt and answer together
  std::int64_t prompt_tokens = 0;      // tokens per call of forward
  std::vector<std::int64_t> prefills;  // N of the methods prefill_N, ascending
  std::vector<int> batches;            // N of the methods decode_bN, ascending
  int lanes = 0;                       // sequences at once
  std::vector<std::int64_t> eos;
  std::int64_t ffn_bytes = 0, store_bytes = 0;    // neurons of the store; the whole store
  std::int64_t fixed_bytes = 0, token_bytes = 0;  // memory without the neuron cache; neurons that a token needs
  std::map<std::string, FileEntry> files;         // by file name
};

// How files are checked against the manifest before they are loaded.
enum class Verify {
  kSizes,
  kChecksums,  // also CRC32C of the manifest and of all files except the store, which has checksums of its own
  kHashes,     // also SHA-256 of all files
};

// A call that reads part of a prompt; size: N of prefill_N, 0: forward.
struct PromptPiece {
  std::int64_t size, count;
};

// The next call for a prompt with `left` tokens from `at` on: the smallest prefill_N that takes all of them, else the
// largest; forward if there is none, or N positions do not fit.
PromptPiece next_piece(const Manifest& manifest, std::int64_t at, std::int64_t left);

// Parses manifest.json; `where` begins error messages. Throws Problem with the name of the field.
Manifest read_manifest(std::string_view text, const std::string& where, Verify verify);

}  // namespace pi2::runner
