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
  std::string executorch;  // version that made the program; empty: not said
  std::string linears;     // how linear layers are stored
  std::int64_t vocab = 0;
  std::int64_t max_tokens = 0;         // prompt and answer together
  std::int64_t prompt_tokens = 0;      // of one call of forward
  std::vector<std::int64_t> prefills;  // tokens of the methods prefill_N, ascending
  std::vector<int> batches;            // of the methods decode_bN, ascending
  int lanes = 0;                       // sequences at once
  std::vector<std::int64_t> eos;
  std::int64_t ffn_bytes = 0, store_bytes = 0;    // neurons of the store; all of it
  std::int64_t fixed_bytes = 0, token_bytes = 0;  // memory without the neuron cache; neurons that a token wants
  std::map<std::string, FileEntry> files;         // by names without folders
};

// How much of what is loaded is compared with the manifest before.
enum class Verify {
  kSizes,
  kChecksums,  // and CRC32C of the manifest and of all files but the store, whose parts have checksums of their own
  kHashes,     // and SHA-256 of all files
};

// A call that reads some of a prompt; size: of prefill_N, 0: forward.
struct PromptPiece {
  std::int64_t size, count;
};

// How a prompt is read from token `at` on, of which so many are left: the smallest prefill_N that takes all of them, or
// else the largest; forward where there is none, or no room for N.
PromptPiece next_piece(const Manifest& manifest, std::int64_t at, std::int64_t left);

// Of the bytes of the file; `where` begins messages. Throws Problem, which names the field.
Manifest read_manifest(std::string_view text, const std::string& where, Verify verify);

}  // namespace pi2::runner
