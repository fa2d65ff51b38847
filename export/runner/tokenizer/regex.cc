#include "tokenizer/regex.h"

#include <oniguruma.h>

#include "problem.h"
#include "tokenizer/utf8.h"

namespace pi2::runner {
namespace {

std::string explain(int code, OnigErrorInfo* info) {
  UChar text[ONIG_MAX_ERROR_MESSAGE_LEN];
  const int bytes = info == nullptr ? onig_error_code_to_str(text, code) : onig_error_code_to_str(text, code, info);
  return {reinterpret_cast<const char*>(text), static_cast<std::size_t>(bytes)};
}

constexpr unsigned long kMostSteps = 100'000'000;

const UChar* bytes_of(std::string_view text) { return reinterpret_cast<const UChar*>(text.data()); }

}  // namespace

void Regex::Free::operator()(re_pattern_buffer* regex) const { onig_free(regex); }

Regex::Regex(const std::string& pattern, const std::string& where) : where_(where) {
  static const int ready = [] {
    OnigEncoding encodings[] = {ONIG_ENCODING_UTF8};
    onig_set_retry_limit_in_search(kMostSteps);  // limits one match; repeated matches have no limit of their own
    return onig_initialize(encodings, 1);
  }();
  if (ready != ONIG_NORMAL)
    throw Problem(where, "Oniguruma to start", explain(ready, nullptr), "Build the runner again.");
  regex_t* regex = nullptr;
  OnigErrorInfo info;
  const UChar* begin = bytes_of(pattern);
  const int code =
      onig_new(&regex, begin, begin + pattern.size(), ONIG_OPTION_NONE, ONIG_ENCODING_UTF8, ONIG_SYNTAX_DEFAULT, &info);
  if (code != ONIG_NORMAL) {
    throw Problem(where, "a regular expression", explain(code, &info) + " in " + pattern, "Correct tokenizer.json.");
  }
  regex_.reset(regex);
}

std::vector<Part> Regex::parts(std::string_view text) const {
  std::vector<Part> found;
  const std::unique_ptr<OnigRegion, void (*)(OnigRegion*)> region(onig_region_new(),
                                                                  [](OnigRegion* r) { onig_region_free(r, 1); });
  const UChar *begin = bytes_of(text), *end = begin + text.size();
  std::size_t from = 0, done = 0;
  bool any = false;
  while (from <= text.size()) {
    const int code = onig_search(regex_.get(), begin, end, begin + from, end, region.get(), ONIG_OPTION_NONE);
    if (code == ONIG_MISMATCH) break;
    if (code < 0) throw Problem(where_, "a text that it can match", explain(code, nullptr), "Shorten the prompt.");
    const auto first = static_cast<std::size_t>(region->beg[0]), last = static_cast<std::size_t>(region->end[0]);
    if (first ==
        last) {  // an empty match: skipped directly after another; the next search begins one character further
      from = last + (last < text.size() ? code_point(text, last).bytes : 1);
      if (any && last == done) continue;
    } else {
      from = last;
    }
    if (first > done) found.push_back({done, first, false});
    found.push_back({first, last, true});
    done = last;
    any = true;
  }
  if (done < text.size()) found.push_back({done, text.size(), false});
  return found;
}

}  // namespace pi2::runner
