#include "tokenizer/bpe.h"

#include <algorithm>
#include <cstdio>
#include <queue>
#include <tuple>

#include "tokenizer/parts.h"
#include "tokenizer/utf8.h"

namespace pi2::runner {
namespace {

constexpr const char* kFix = "Export the bundle again, with the tokenizer of the model.";

std::uint64_t key(std::uint32_t a, std::uint32_t b) { return static_cast<std::uint64_t>(a) << 32 | b; }

}  // namespace

Bpe::Bpe(const Fields& model) {
  if (model.text("type") != "BPE") unknown(model.where() + ", type", "BPE", model.text("type"));
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix", "dropout"}) {
    if (model.has(name) && model.data()[name] != "" && model.data()[name] != 0.0) {
      unknown(model.where() + ", " + name, "none", shown(model.data()[name]));
    }
  }
  const Fields vocabulary = model.sub("vocab");
  ids_.reserve(vocabulary.data().size());
  for (const auto& [token, id] : vocabulary.data().items()) {
    if (!id.is_number_unsigned() || id > 0x7fffffffu) {
      throw Problem(vocabulary.where(), "a number for each token", shown(id), kFix);
    }
    ids_.emplace(token, id.get<std::uint32_t>());
  }
  const auto id_of = [&](const std::string& token) {
    const auto found = ids_.find(token);
    if (found == ids_.end()) throw Problem(model.where() + ", merges", "tokens of the vocabulary", token, kFix);
    return found->second;
  };
  const Json& merges = model.list("merges");
  merges_.reserve(merges.size());
  std::uint32_t rank = 0;
  for (const Json& merge : merges) {
    std::string a, b;
    if (merge.is_string()) {  // of older files
      const auto& text = merge.get_ref<const std::string&>();
      const std::size_t space = text.find(' ');
      a = text.substr(0, space);
      b = space == std::string::npos ? "" : text.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      a = merge[0], b = merge[1];
    } else {
      throw Problem(model.where() + ", merges", "pairs of tokens", shown(merge), kFix);
    }
    merges_[key(id_of(a), id_of(b))] = {rank++, id_of(a + b)};
  }
  whole_words_ = model.flag("ignore_merges", false);
  fuse_unknown_ = model.flag("fuse_unk", false);
  if (model.has("unk_token")) unknown_ = id_of(model.text("unk_token"));
  if (model.flag("byte_fallback", false)) {
    for (unsigned byte = 0; byte < 256; ++byte) {
      char name[8];
      std::snprintf(name, sizeof name, "<0x%02X>", byte);
      const auto found = ids_.find(name);
      of_byte_.push_back(found == ids_.end() ? -1 : static_cast<std::int64_t>(found->second));
    }
  }
}

const Bpe::Merge* Bpe::merge(std::uint32_t a, std::uint32_t b) const {
  const auto found = merges_.find(key(a, b));
  return found == merges_.end() ? nullptr : &found->second;
}

// Characters as tokens. A character that is not in the vocabulary becomes its bytes, the unknown token, or nothing.
std::vector<std::uint32_t> Bpe::symbols(std::string_view piece) const {
  std::vector<std::uint32_t> out;
  bool pending = false;  // an unknown token that may merge with the next one
  const auto settle = [&] {
    if (pending) out.push_back(static_cast<std::uint32_t>(unknown_));
    pending = false;
  };
  for (std::size_t at = 0; at < piece.size();) {
    const std::string_view character = piece.substr(at, code_point(piece, at).bytes);
    at += character.size();
    if (const auto found = ids_.find(std::string(character)); found != ids_.end()) {
      settle();
      out.push_back(found->second);
      continue;
    }
    const auto byte_id = [&](char byte) { return of_byte_[static_cast<unsigned char>(byte)]; };
    if (!of_byte_.empty() &&
        std::all_of(character.begin(), character.end(), [&](char byte) { return byte_id(byte) >= 0; })) {
      for (const char byte : character) out.push_back(static_cast<std::uint32_t>(byte_id(byte)));
    } else if (unknown_ >= 0) {
      if (!fuse_unknown_) settle();
      pending = true;
    }
  }
  settle();
  return out;
}

void Bpe::encode(const std::string& piece, std::vector<std::int64_t>& ids) const {
  if (whole_words_) {
    if (const auto found = ids_.find(piece); found != ids_.end()) {
      ids.push_back(found->second);
      return;
    }
  }
  std::vector<std::uint32_t> symbols = this->symbols(piece);
  // Neighbours of each remaining symbol; symbols merged into their left neighbour are removed.
  const int n = static_cast<int>(symbols.size());
  std::vector<int> before(symbols.size()), behind(symbols.size());
  std::vector<bool> gone(symbols.size());
  using Candidate = std::tuple<std::uint32_t, int, std::uint32_t>;  // rank, position, merged token
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto offer = [&](int left, int right) {
    if (left < 0 || right >= n) return;
    const Merge* found = merge(symbols[left], symbols[right]);
    if (found != nullptr) queue.emplace(found->rank, left, found->to);
  };
  for (int i = 0; i < n; ++i) {
    before[i] = i - 1;
    behind[i] = i + 1;
    offer(i, i + 1);
  }
  while (!queue.empty()) {
    const auto [rank, left, to] = queue.top();
    queue.pop();
    if (gone[left] || behind[left] >= n) continue;
    const int right = behind[left];
    const Merge* found = merge(symbols[left], symbols[right]);
    if (found == nullptr || found->to != to) continue;  // one of the two has been merged since
    symbols[left] = to;
    gone[right] = true;
    behind[left] = behind[right];
    if (behind[right] < n) before[behind[right]] = left;
    offer(before[left], left);
    offer(left, behind[left]);
  }
  for (int i = 0; i < n; ++i) {
    if (!gone[i]) ids.push_back(symbols[i]);
  }
}

}  // namespace pi2::runner
