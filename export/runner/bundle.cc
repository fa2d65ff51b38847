#include "bundle.h"

#include <algorithm>
#include <cstdio>
#include <system_error>

#include "base/crc32c.h"
#include "fields.h"
#include "files.h"
#include "problem.h"
#include "sha256.h"

namespace pi2::runner {
namespace {

namespace fs = std::filesystem;

constexpr const char* kCopy = "Copy the bundle again, or export it again.";
constexpr const char* kStore = "model.pi2";

std::string hex(std::uint32_t checksum) {
  char text[9];
  std::snprintf(text, sizeof text, "%08x", checksum);
  return text;
}

std::uint32_t crc32c_of(const RegularFile& file) {
  std::uint32_t checksum = 0;
  file.read([&](std::string_view piece) { checksum = crc32c(piece.data(), piece.size(), checksum); });
  return checksum;
}

void differ(const fs::path& file, const std::string& expected, const std::string& found) {
  if (found == expected) return;
  throw Problem(file.string(), expected.substr(0, 21) + (expected.size() > 21 ? "..." : "") + ", as manifest.json says",
                found.substr(0, 21) + (found.size() > 21 ? "..." : "") + ": it was changed or damaged", kCopy);
}

void check_file(const fs::path& path, const FileEntry& entry, Verify verify) {
  const std::string expected = std::to_string(entry.bytes) + " bytes, as manifest.json says";
  std::error_code error;
  if (!fs::exists(path, error)) throw Problem(path.string(), expected, "no such file", kCopy);
  const RegularFile file(path);
  if (file.bytes() != entry.bytes) {
    throw Problem(path.string(), expected,
                  std::to_string(file.bytes()) + " bytes" + (file.bytes() < entry.bytes ? ": it is cut" : ""), kCopy);
  }
  if (verify != Verify::kSizes && (verify == Verify::kHashes || path.filename() != kStore)) {
    differ(path, "CRC32C " + hex(entry.crc32c), "CRC32C " + hex(crc32c_of(file)));
  }
  if (verify == Verify::kHashes) differ(path, "SHA-256 " + entry.sha256, "SHA-256 " + sha256_of(file));
}

// Symbolic links must lead to files of the folder: a bundle loads nothing from outside.
void check_link(const fs::path& folder, const fs::path& path) {
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  if (error || real.parent_path() == fs::canonical(folder, error)) return;  // missing files are reported elsewhere
  throw Problem(path.string(), "a file of the bundle", "a link to " + real.string(),
                path.filename() == kStore ? "Copy the file there, or pass --store." : "Copy the file there.");
}

}  // namespace

Manifest open_bundle(const fs::path& folder, const fs::path& store, Verify verify) {
  const fs::path file = folder / "manifest.json";
  std::error_code error;
  if (!fs::exists(file, error)) {
    throw Problem(folder.string(), "a bundle: a folder with manifest.json",
                  fs::is_directory(folder, error) ? "none in it" : "no such folder",
                  "Make one: torch-pi2 export MODEL --out BUNDLE.");
  }
  const Manifest manifest = read_manifest(read_file(file, kMostSmall), file.string(), verify);
  for (const auto& [name, entry] : manifest.files) {
    if (name == kStore && !store.empty()) {
      check_file(fs::is_directory(store, error) ? store / name : store, entry, verify);
    } else {
      check_link(folder, folder / name);
      check_file(folder / name, entry, verify);
    }
  }
  return manifest;
}

}  // namespace pi2::runner
