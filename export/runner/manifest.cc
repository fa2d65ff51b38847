#include "manifest.h"

#include <algorithm>
#include <system_error>

#include "fields.h"
#include "sha256.h"

namespace pi2::runner {
namespace {

namespace fs = std::filesystem;

constexpr const char* kCopy = "Copy the bundle again, or export it again.";

void check_file(const fs::path& file, const Fields& entry, bool hashes) {
  const std::int64_t expected = entry.number("bytes");
  std::error_code error;
  const bool exists = fs::is_regular_file(file, error);
  const auto found = exists ? static_cast<std::int64_t>(fs::file_size(file, error)) : 0;
  if (!exists || error || found != expected) {
    throw Problem(
        file.string(), std::to_string(expected) + " bytes, as manifest.json says",
        !exists || error ? "no such file" : std::to_string(found) + " bytes" + (found < expected ? ": it is cut" : ""),
        kCopy);
  }
  if (!hashes) return;
  const std::string& wanted = entry.text("sha256");
  if (const std::string hash = sha256_of(file); hash != wanted) {
    throw Problem(file.string(), "SHA-256 " + wanted.substr(0, 12) + "..., as manifest.json says",
                  hash.substr(0, 12) + "...: it was changed or damaged", kCopy);
  }
}

// As an int.
int count(const Fields& fields, const char* name) {
  constexpr int kMost = 1 << 20;
  const std::int64_t value = fields.number(name);
  if (value > kMost) {
    throw Problem(fields.where() + ", " + name, "at most " + std::to_string(kMost), std::to_string(value), kCopy);
  }
  return static_cast<int>(value);
}

// Programs of one version of ExecuTorch run with no other.
void check_version(const std::string& made, const fs::path& file) {
  if (made.empty() || made.substr(0, made.find('+')) == PI2_EXECUTORCH_VERSION) return;
  throw Problem(file.string() + ", made_by", "executorch " PI2_EXECUTORCH_VERSION ", as this runner is built with",
                made, "Export the bundle again with that version, or use the runner of the torch_pi2 that made it.");
}

void read_methods(const Fields& methods, const std::string& where, Manifest& m) {
  bool prefill = false, fork = false;
  for (const auto& [name, value] : methods.data().items()) {
    const Fields method(value, methods.where() + ", " + name);
    const std::string& kind = method.text("kind");
    if (kind == "prefill") {
      prefill = true;
      m.prompt_tokens = method.number("max_tokens");
    } else if (kind == "decode") {
      m.batches.push_back(count(method, "batch"));
    } else if (kind == "fork") {
      fork = true;
    }
  }
  std::sort(m.batches.begin(), m.batches.end());
  if (!prefill || m.batches.empty() || m.batches[0] < 1 || m.prompt_tokens < 1 || (m.lanes > 1 && !fork) ||
      m.batches.back() != m.lanes) {
    throw Problem(where + ", methods", "prefill, decode_bN up to as many sequences as there are lanes, and fork",
                  shown(methods.data()), "Export it again with this version of torch_pi2.");
  }
}

}  // namespace

Manifest open_bundle(const fs::path& folder, const fs::path& store, bool hashes) {
  const fs::path file = folder / "manifest.json";
  if (!fs::is_regular_file(file)) {
    throw Problem(folder.string(), "a bundle: a folder with manifest.json",
                  fs::is_directory(folder) ? "none in it" : "no such folder",
                  "Make one: torch-pi2 export MODEL --out BUNDLE.");
  }
  const Json json = read_json(file);
  const Fields fields(json, file.string());
  const std::string& format = fields.text("format");
  const std::int64_t version = fields.number("version");
  if (format != "torch_pi2.bundle" || version != 2) {
    throw Problem(file.string(), "format torch_pi2.bundle, version 2", format + ", version " + std::to_string(version),
                  "Use the runner of the torch_pi2 that wrote it, or export it again.");
  }
  if (fields.text("kind") != "decoder") {
    throw Problem(file.string() + ", kind", "decoder", fields.text("kind"),
                  "This runner generates text; call other modules with torch_pi2 or ExecuTorch's Module.");
  }
  Manifest m;
  m.target = fields.text("target");
  const Fields made_by = fields.sub("made_by"), model = fields.sub("model"), memory = fields.sub("memory");
  if (made_by.has("executorch")) m.executorch = made_by.text("executorch");
  check_version(m.executorch, file);
  m.model = model.text("class");
  m.linears = model.text("linears");
  m.vocab = model.number("vocab");
  m.max_tokens = fields.number("max_tokens");
  m.lanes = count(fields, "lanes");
  m.eos = fields.numbers("eos");
  m.ffn_bytes = fields.sub("bytes").number("ffn");
  m.store_bytes = fields.sub("bytes").number("store");
  m.fixed_bytes = memory.number("fixed_bytes");
  m.token_bytes = memory.number("token_bytes");
  read_methods(fields.sub("methods"), file.string(), m);
  const Fields files = fields.sub("files");
  for (const char* name : {"model.pte", "model.pi2"}) files.sub(name);
  for (const auto& [name, entry] : files.data().items()) {
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos) {
      throw Problem(files.where(), "names of files without folders", name, kCopy);
    }
    const bool elsewhere = name == "model.pi2" && !store.empty();
    const fs::path where = !elsewhere ? folder / name : fs::is_directory(store) ? store / name : store;
    check_file(where, Fields(entry, files.where() + ", " + name), hashes);
  }
  return m;
}

}  // namespace pi2::runner
