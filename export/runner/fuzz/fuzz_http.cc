// Any bytes as the input of a connection to the runner's server: requests do not depend on how the bytes are cut, and a
// body is refused with one line or is valid for the code that answers it. The first byte selects the cuts.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "http/reader.h"
#include "openai.h"
#include "request_line.h"

namespace {

using namespace pi2::runner;

void must(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// As text, for comparison.
std::string of(HttpReader& reader) {
  if (reader.wrong().status != 0) return "wrong " + std::to_string(reader.wrong().status);
  const HttpRequest& r = reader.request();
  return r.method + '\n' + r.path + '\n' + r.host + '\n' + r.content_type + '\n' + (r.keeps_alive ? "1" : "0") + '\n' +
         r.body;
}

// Feeds the input in pieces of at most `most` bytes.
std::vector<std::string> read(std::string_view bytes, std::size_t most) {
  std::vector<std::string> found;
  auto reader = std::make_unique<HttpReader>();
  while (!bytes.empty()) {
    std::string_view piece = bytes.substr(0, most);
    bytes.remove_prefix(piece.size());
    while (!piece.empty()) {
      const std::size_t taken = reader->take(piece);
      must(taken <= piece.size(), "more than there was");
      piece.remove_prefix(taken);
      (void)reader->take_continue();
      must(reader->body_bytes() <= HttpReader::kMostBody, "the body");
      if (!reader->whole() && reader->wrong().status == 0) break;
      found.push_back(of(*reader));
      if (reader->wrong().status != 0) return found;
      reader = std::make_unique<HttpReader>();
    }
  }
  return found;
}

void ask(const std::string& body, bool chat) {
  try {
    const Options o = request_of(asked_of(body, chat, 4).line, Options());
    must(chat == o.chat && o.messages.empty() == !chat, "a talk");
    must(o.request.max_new_tokens >= 0 && o.request.sequences >= 0, "counts");
  } catch (const Problem& problem) {
    must(std::strlen(problem.what()) < 8192 && std::strpbrk(problem.what(), "\n\r\x1b") == nullptr, "no short line");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::size_t pieces = data[0] & 0x3f;
  if (pieces == 0) {
    ask(std::string(bytes), (data[0] & 0x40) != 0);
    return 0;
  }
  must(read(bytes, pieces) == read(bytes, bytes.size()), "it depends on how it is cut");
  return 0;
}
