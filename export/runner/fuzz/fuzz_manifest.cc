// Any bytes as manifest.json, chat.json, a line of --requests or generation_config.json: refused with one line, or
// valid for the code that uses it. The first byte selects the kind, whether the manifest's checksum is corrected first,
// and whether a chat has two turns.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "chat.h"
#include "fields.h"
#include "generation_config.h"
#include "manifest.h"
#include "request_line.h"

namespace {

using namespace pi2::runner;

constexpr std::uint8_t kChat = 1, kSystem = 2, kSealed = 4, kRequest = 8;

void must(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

void check(const Manifest& m) {
  must(m.vocab >= 0 && m.vocab < std::int64_t{1} << 31, "vocabulary");
  must(m.lanes > 0 && !m.batches.empty() && m.batches.front() > 0 && m.batches.back() == m.lanes, "batches");
  must(m.prompt_tokens > 0 && m.max_tokens >= 0, "tokens");
  must(m.ffn_bytes <= m.store_bytes && m.files.contains("model.pte") &&
           (m.store_bytes == 0 || m.files.contains("model.pi2")),
       "files");
  for (const auto& [name, entry] : m.files) {
    must(!name.empty() && name != "." && name != ".." && name.find_first_of("/\\\n") == std::string::npos, "a name");
    must(entry.bytes >= 0, "bytes");
  }
}

void check(const GenerationConfig& found) {
  check(found.sampling, "");
  must(std::none_of(found.stop.begin(), found.stop.end(), [](const std::string& stop) { return stop.empty(); }),
       "stop");
}

void check(const Options& o) {
  must(o.request.max_new_tokens >= 0 && o.request.sequences >= 0, "counts");
  must(o.messages.empty() || o.chat, "a talk without a template");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    if ((data[0] & kRequest) != 0) {
      const Json json = parse_request(text);
      if ((data[0] & kChat) != 0) return check(generation_config(json, "generation_config.json")), 0;
      return check(request_of(json, Options())), 0;
    }
    if ((data[0] & kChat) != 0) {
      std::vector<Message> messages;
      if ((data[0] & kSystem) != 0) messages.push_back({"system", "\u3000Be brief. "});
      for (int turn = 0; turn <= ((data[0] & kSealed) != 0 ? 1 : 0); ++turn) {
        if (turn > 0) messages.push_back({"assistant", "\nanswer"});
        messages.push_back({"user", " question "});
      }
      (void)chat_text(parse_json(text, "chat.json"), "chat.json", messages);
      return 0;
    }
    if ((data[0] & kSealed) != 0) {
      char line[32];
      std::snprintf(line, sizeof line, "{\"crc32c\": \"%08x\",\n", pi2::crc32c(text.data(), text.size()));
      text.insert(0, line);
    }
    check(read_manifest(text, "manifest.json", (data[0] & kSystem) != 0 ? Verify::kSizes : Verify::kChecksums));
  } catch (const Problem& problem) {
    must(std::strlen(problem.what()) < 8192 && std::strpbrk(problem.what(), "\n\r\x1b") == nullptr, "no short line");
  }
  return 0;
}
