// Any bytes as tokenizer.json: refused with one line, or text survives encoding and decoding.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "fields.h"
#include "tokenizer/text_stream.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8.h"

namespace {

using namespace pi2::runner;

void must(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

void there_and_back(const Tokenizer& tokenizer) {
  std::vector<std::int64_t> ids =
      tokenizer.encode(" The tool's 12 caf\xc3\xa9 \xe6\x97\xa5\xf0\x9f\x99\x82 <s>e\xcc\x81\n\tx", true);
  for (std::int64_t id = -2; id < 20; ++id) ids.push_back(id);
  const std::size_t half = ids.size() / 2;
  TextStream stream(tokenizer, {ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(half)});
  std::string all;
  for (std::size_t i = half; i < ids.size(); ++i) all += stream.add(ids[i]);
  must(is_utf8(all + stream.rest() + stream.text()), "text that is no UTF-8");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    there_and_back(Tokenizer(parse_json(text, "tokenizer.json"), "tokenizer.json"));
  } catch (const Problem& problem) {
    must(std::strlen(problem.what()) < 8192 && std::strpbrk(problem.what(), "\n\r\x1b") == nullptr, "no short line");
  }
  return 0;
}
