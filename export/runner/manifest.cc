#include "manifest.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <limits>

#include "base/crc32c.h"
#include "fields.h"

namespace pi2::runner {
namespace {

constexpr const char* kCopy = "Copy the bundle again, or export it again.";

// 8 hexadecimal digits, lower case.
bool is_checksum(std::string_view text) {
  return text.size() == 8 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::uint32_t checksum_of(const std::string& text) { return static_cast<std::uint32_t>(std::stoul(text, nullptr, 16)); }

// The first line is {"crc32c": "0123abcd", the checksum of all bytes after it.
void check_itself(std::string_view text, const std::string& where) {
  constexpr std::string_view kBefore = "{\"crc32c\": \"", kBehind = "\",\n";
  constexpr std::size_t kDigits = 8, kLine = kBefore.size() + kDigits + kBehind.size();
  const std::string_view digits = text.substr(0, kLine).substr(std::min(text.size(), kBefore.size()), kDigits);
  const bool there =
      text.starts_with(kBefore) && is_checksum(digits) && text.substr(kBefore.size() + kDigits).starts_with(kBehind);
  char found[9] = "none";
  if (there) std::snprintf(found, sizeof found, "%08x", crc32c(text.data() + kLine, text.size() - kLine));
  if (found == digits) return;
  throw Problem(
      where, "its CRC32C of all that follows in the first line" + (there ? ", " + std::string(digits) : std::string()),
      std::string(found) + ": it was changed or damaged",
      "Copy the bundle again, export again, or pass --no-verify if the change is meant.");
}

std::int64_t at_most(const Fields& fields, const char* name, std::int64_t most) {
  const std::int64_t value = fields.number(name);
  if (value <= most) return value;
  throw Problem(fields.where() + ", " + name, "at most " + std::to_string(most), std::to_string(value), kCopy);
}

// A count as int.
int count(const Fields& fields, const char* name) { return static_cast<int>(at_most(fields, name, 1 << 20)); }

// Programs only run with the version of ExecuTorch that made them.
void check_version(const std::string& made, const std::string& where) {
  if (made.empty() || made.substr(0, made.find('+')) == PI2_EXECUTORCH_VERSION) return;
  throw Problem(where + ", made_by", "executorch " PI2_EXECUTORCH_VERSION ", as this runner is built with", made,
                "Export the bundle again with that version, or use the runner of the torch_pi2 that made it.");
}

void read_methods(const Fields& methods, const std::string& where, Manifest& m) {
  bool forward = false, fork = false;
  for (const auto& [name, value] : methods.data().items()) {
    const Fields method(value, methods.where() + ", " + name);
    const std::string& kind = method.text("kind");
    std::string named = kind;
    if (kind == "forward") {
      forward = true;
      m.prompt_tokens = method.number("max_tokens");
    } else if (kind == "prefill") {
      m.prefills.push_back(method.number("max_tokens"));
      named += "_" + std::to_string(m.prefills.back());
    } else if (kind == "decode") {
      m.batches.push_back(count(method, "batch"));
      named += "_b" + std::to_string(m.batches.back());
    } else if (kind == "fork") {
      fork = true;
    }
    if (name != named) throw Problem(methods.where(), "the name of its kind and size, " + named, name, kCopy);
  }
  std::sort(m.prefills.begin(), m.prefills.end());
  std::sort(m.batches.begin(), m.batches.end());
  if (!forward || m.batches.empty() || m.batches[0] < 1 || m.prompt_tokens < 1 || (m.lanes > 1 && !fork) ||
      m.batches.back() != m.lanes) {
    throw Problem(where + ", methods", "forward, decode_bN up to as many sequences as there are lanes, and fork",
                  shown(methods.data()), "Export it again with this version of torch_pi2.");
  }
}

FileEntry read_entry(const Fields& fields) {
  const std::string& checksum = fields.text("crc32c");
  if (!is_checksum(checksum)) {
    throw Problem(fields.where() + ", crc32c", "8 hexadecimal digits", checksum, kCopy);
  }
  return {fields.number("bytes"), checksum_of(checksum), fields.text("sha256")};
}

// File names without folders.
void check_name(const std::string& name, const std::string& where) {
  const bool strange = std::any_of(name.begin(), name.end(),
                                   [](unsigned char c) { return c == '/' || c == '\\' || std::iscntrl(c) != 0; });
  if (name.empty() || name == "." || name == ".." || name == "manifest.json" || strange) {
    throw Problem(where, "names of files without folders", name, kCopy);
  }
}

// A model without neurons has no store.
void read_files(const Fields& files, bool neurons, Manifest& m) {
  files.sub("model.pte");
  if (neurons) files.sub("model.pi2");
  for (const auto& [name, entry] : files.data().items()) {
    check_name(name, files.where());
    m.files[name] = read_entry(Fields(entry, files.where() + ", " + name));
  }
  if (const auto store = m.files.find("model.pi2"); store != m.files.end()) m.store_bytes = store->second.bytes;
}

}  // namespace

PromptPiece next_piece(const Manifest& manifest, std::int64_t at, std::int64_t left) {
  std::int64_t size = 0;
  for (const std::int64_t n : manifest.prefills) {
    if (at + n <= manifest.max_tokens && size < left) size = n;
  }
  return {size, std::min(left, size == 0 ? manifest.prompt_tokens : size)};
}

Manifest read_manifest(std::string_view text, const std::string& where, Verify verify) {
  const Json json = parse_json(text, where);
  const Fields fields(json, where);
  const std::string& format = fields.text("format");
  const std::int64_t version = fields.number("version");
  if (format != "torch_pi2.bundle" || version != 4) {
    throw Problem(where, "format torch_pi2.bundle, version 4", format + ", version " + std::to_string(version),
                  "Use the runner of the torch_pi2 that wrote it, or export it again.");
  }
  if (verify != Verify::kSizes) check_itself(text, where);
  if (fields.text("kind") != "decoder") {
    throw Problem(where + ", kind", "decoder", fields.text("kind"),
                  "This runner generates text; call other modules with torch_pi2 or ExecuTorch's Module.");
  }
  Manifest m;
  m.target = fields.text("target");
  const Fields made_by = fields.sub("made_by"), model = fields.sub("model"), memory = fields.sub("memory");
  if (made_by.has("executorch")) m.executorch = made_by.text("executorch");
  check_version(m.executorch, where);
  m.model = model.text("class");
  m.linears = model.text("linears");
  m.vocab = at_most(model, "vocab", std::numeric_limits<std::int32_t>::max());
  m.max_tokens = fields.number("max_tokens");
  m.lanes = count(fields, "lanes");
  m.eos = fields.numbers("eos");
  read_files(fields.sub("files"), model.number("layers") > 0, m);
  m.ffn_bytes = at_most(fields.sub("bytes"), "ffn", m.store_bytes);
  m.fixed_bytes = memory.number("fixed_bytes");
  m.token_bytes = memory.number("token_bytes");
  read_methods(fields.sub("methods"), where, m);
  return m;
}

}  // namespace pi2::runner
