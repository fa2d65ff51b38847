#include "tokenizer/added_tokens.h"

#include <algorithm>
#include <utility>

namespace pi2::runner {
namespace {

// Word characters by Unicode Technical Standard 18.
#define PI2_WORD R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}])"

// The part that the pattern matches; there is at most one.
Part match_of(const Regex& regex, std::string_view text) {
  for (const Part& part : regex.parts(text)) {
    if (part.match) return part;
  }
  return {0, 0, false};
}

}  // namespace

AddedTokens::AddedTokens()
    : word_at_end_(PI2_WORD R"(\z)", "tokenizer"),
      word_at_start_(R"(\A)" PI2_WORD, "tokenizer"),
      space_at_end_(R"(\p{White_Space}+\z)", "tokenizer"),
      space_at_start_(R"(\A\p{White_Space}+)", "tokenizer") {}

void AddedTokens::add(AddedToken token) {
  of_[static_cast<unsigned char>(token.content[0])].push_back(std::move(token));
}

void AddedTokens::sort() {
  const auto longer = [](const AddedToken& a, const AddedToken& b) { return a.content.size() > b.content.size(); };
  for (auto& list : of_) std::stable_sort(list.begin(), list.end(), longer);
}

const AddedToken* AddedTokens::at(std::string_view text, std::size_t place) const {
  for (const AddedToken& token : of_[static_cast<unsigned char>(text[place])]) {
    if (text.substr(place).starts_with(token.content)) return &token;
  }
  return nullptr;
}

std::vector<Found> AddedTokens::find(std::string_view text) const {
  std::vector<Found> out;
  std::size_t done = 0;
  for (std::size_t place = 0; place < text.size();) {
    const AddedToken* token = at(text, place);
    if (token == nullptr) {
      ++place;
      continue;
    }
    std::size_t begin = place, end = place + token->content.size();
    place = end;
    if (token->single_word &&
        (match_of(word_at_end_, text.substr(0, begin)).match || match_of(word_at_start_, text.substr(end)).match)) {
      continue;
    }
    if (token->lstrip) {
      if (const Part space = match_of(space_at_end_, text.substr(0, begin)); space.match) {
        begin = std::max(space.begin, done);
      }
    }
    if (token->rstrip) end += match_of(space_at_start_, text.substr(end)).end;
    if (done < begin) out.push_back({text.substr(done, begin - done), -1});
    out.push_back({text.substr(begin, end - begin), token->id});
    done = end;
  }
  if (done < text.size()) out.push_back({text.substr(done), -1});
  return out;
}

}  // namespace pi2::runner
