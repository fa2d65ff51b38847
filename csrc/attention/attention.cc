// Splits the positions into work items and puts their results together: see pi2/attention.h.
#include "pi2/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/convert.h"
#include "base/parallel.h"
#include "base/scratch.h"
#include "base/trace.h"
#include "pi2/kernels.h"

namespace pi2 {
namespace {

constexpr std::int64_t kSplitWords = kAttentionSplit / kAttendWord;
constexpr std::int64_t kTileRows = 64;  // queries, sums and scores of so many, and a word of keys, are in L2 together
constexpr std::int64_t kAlone = 64;     // tiles that are enough work items for any number of threads
constexpr std::int64_t kTinyMacs = 1 << 16;  // waking a thread costs a few microseconds
constexpr float kNone = -std::numeric_limits<float>::infinity();

// What the splits of a tile found: [splits, rows], y: [., ld].
struct Found {
  float *max, *sum, *y;
};

struct Work {
  const AttentionArgs& args;
  AttendFn attend;
  std::int64_t group, ld;
  std::int64_t tile_tokens, tiles;  // of a key head: as many tokens as have kTileRows queries
  std::int64_t words, splits;       // as far as any token sees
  const std::uint64_t* mask;        // [batch, tokens, ld_mask]
  std::int64_t ld_mask;
  float* found;  // of all tiles, if their splits are work items of their own

  const char* at(const void* data, const std::int64_t (&strides)[3], std::int64_t b, std::int64_t head) const {
    return static_cast<const char*>(data) + (b * strides[0] + head * strides[1]) * row_bytes(args.dtype, 1);
  }

  // Queries of one key head and some tokens.
  struct Tile {
    std::int64_t b, head, token, tokens, rows;  // rows: tokens * group, token by token
  };

  Tile tile(std::int64_t index) const {
    const std::int64_t token = index % tiles * tile_tokens, tokens = std::min(tile_tokens, args.tokens - token);
    return {index / tiles / args.key_heads, index / tiles % args.key_heads, token, tokens, tokens * group};
  }

  std::int64_t found_floats() const { return splits * tile_tokens * group * (ld + 2); }

  Found found_at(float* memory) const {
    const std::int64_t rows = splits * tile_tokens * group;
    return {memory, memory + rows, memory + 2 * rows};
  }

  // [tokens, group, ld], what is beyond width zero.
  float* queries(const Tile& t) const {
    float *q = scratch(Scratch::kInput, t.rows * ld), *out = q;
    for (std::int64_t r = 0; r < t.rows; ++r, out += ld) {
      const char* from = at(args.query, args.query_strides, t.b, t.head * group + r % group) +
                         (t.token + r / group) * args.query_strides[2] * row_bytes(args.dtype, 1);
      widen(from, args.dtype, out, args.width);
      std::fill(out + args.width, out + ld, 0.0f);
    }
    return q;
  }

  void split(const Tile& t, std::int64_t s, const float* q, const Found& found) const {
    AttendArgs a;
    a.tokens = t.tokens;
    a.group = group;
    a.width = args.width;
    a.ld = ld;
    a.q = q;
    a.key = at(args.key, args.key_strides, t.b, t.head);
    a.value = at(args.value, args.value_strides, t.b, t.head);
    a.key_stride = args.key_strides[2] * row_bytes(args.dtype, 1);
    a.value_stride = args.value_strides[2] * row_bytes(args.dtype, 1);
    a.mask = mask + (t.b * args.tokens + t.token) * ld_mask;
    a.words = ld_mask;
    a.begin = s * kSplitWords;
    a.end = std::min(words, a.begin + kSplitWords);
    a.scale = args.scale;
    a.scores = scratch(Scratch::kScores, t.rows * kAttendWord);
    a.max = found.max + s * t.rows;
    a.sum = found.sum + s * t.rows;
    a.y = found.y + s * t.rows * ld;
    std::fill_n(a.max, t.rows, kNone);
    std::fill_n(a.sum, t.rows, 0.0f);
    std::fill_n(a.y, t.rows * ld, 0.0f);
    attend(a);
  }

  // Row by row, the splits in order. Where nothing was seen, nothing is added.
  void combine(const Tile& t, const Found& found) const {
    float* out = scratch(Scratch::kScores, ld);
    for (std::int64_t r = 0; r < t.rows; ++r) {
      float top = kNone;
      for (std::int64_t s = 0; s < splits; ++s) top = std::max(top, found.max[s * t.rows + r]);
      float total = 0;
      std::fill_n(out, ld, 0.0f);
      for (std::int64_t s = 0; s < splits; ++s) {
        const std::int64_t at = s * t.rows + r;
        if (found.sum[at] == 0) continue;
        const float factor = std::exp(found.max[at] - top);
        total += factor * found.sum[at];
        for (std::int64_t k = 0; k < args.width; ++k) out[k] += factor * found.y[at * ld + k];
      }
      if (total != 0)
        for (std::int64_t k = 0; k < args.width; ++k) out[k] /= total;
      const std::int64_t n = t.head * group + r % group;
      const std::int64_t place = (t.b * args.tokens + t.token + r / group) * args.heads + n;
      narrow(out, static_cast<char*>(args.y) + place * row_bytes(args.dtype, args.width), args.dtype, args.width);
    }
  }

  void split_item(std::int64_t item) const {
    const Tile t = tile(item / splits);
    split(t, item % splits, queries(t), found_at(found + item / splits * found_floats()));
  }

  void combine_item(std::int64_t item) const { combine(tile(item), found_at(found + item * found_floats())); }

  void whole_item(std::int64_t item) const {
    // those that see most first, so that no thread is left with a long one
    const std::int64_t index = item / tiles * tiles + tiles - 1 - item % tiles;
    const Tile t = tile(index);
    const Found here = found_at(scratch(Scratch::kPartials, found_floats()));
    const float* q = queries(t);
    for (std::int64_t s = 0; s < splits; ++s) split(t, s, q, here);
    combine(t, here);
  }
};

// Eight bytes to a bit each, whatever is not zero in them.
std::uint64_t bits_of(const std::uint8_t* bytes) {
  std::uint64_t x;
  std::memcpy(&x, bytes, sizeof(x));
  x = ((x & 0x7f7f7f7f7f7f7f7f) + 0x7f7f7f7f7f7f7f7f) | x;
  return ((x >> 7 & 0x0101010101010101) * 0x0102040810204080) >> 56;
}

struct Mask {
  const AttentionArgs& args;
  std::int64_t words;
  std::uint64_t* out;  // [batch, tokens, words]

  void pack(std::int64_t row) const {
    const std::int64_t b = row / args.tokens, t = row % args.tokens;
    const std::uint8_t* mask = args.mask + b * args.mask_strides[0] + t * args.mask_strides[1];
    const std::int64_t end = args.mask == nullptr && args.causal ? std::min(t + 1, args.length) : args.length;
    for (std::int64_t w = 0; w < words; ++w) {
      const std::int64_t first = w * kAttendWord, count = std::clamp<std::int64_t>(end - first, 0, kAttendWord);
      std::uint64_t word = count == kAttendWord ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
      if (args.mask != nullptr) {
        word = 0;
        std::int64_t i = 0;
        for (; i + 8 <= count; i += 8) word |= bits_of(mask + first + i) << i;
        for (; i < count; ++i) word |= static_cast<std::uint64_t>(mask[first + i] != 0) << i;
      }
      out[row * words + w] = word;
    }
  }

  // Words up to the last that any token sees.
  std::int64_t seen() const {
    std::int64_t seen = 0;
    for (std::int64_t row = args.batch * args.tokens; row-- > 0;) {  // late tokens see most
      std::int64_t last = words;
      while (last > seen && out[row * words + last - 1] == 0) --last;
      seen = last;
    }
    return seen;
  }
};

}  // namespace

void attention(const AttentionArgs& args, const ParallelFor& parallel) {
  const std::int64_t all_words = (args.length + kAttendWord - 1) / kAttendWord, masks = args.batch * args.tokens;
  const Mask mask{args, all_words, reinterpret_cast<std::uint64_t*>(scratch(Scratch::kMask, 2 * masks * all_words))};
  Dynamic::run(
      masks * args.length < kTinyMacs ? serial() : parallel, masks,
      [](void* m, std::int64_t row) { static_cast<const Mask*>(m)->pack(row); }, const_cast<Mask*>(&mask));

  Work work{args, kernels().attend[static_cast<int>(args.dtype)]};
  work.group = args.heads / args.key_heads;
  work.ld = (args.width + kAttendPad - 1) / kAttendPad * kAttendPad;
  work.tile_tokens = std::clamp<std::int64_t>(kTileRows / work.group, 1, args.tokens);
  work.tiles = (args.tokens + work.tile_tokens - 1) / work.tile_tokens;
  work.words = mask.seen();
  work.splits = (work.words + kSplitWords - 1) / kSplitWords;
  work.mask = mask.out;
  work.ld_mask = all_words;
  const TraceSpan span(Stage::kAttention, work.words * kAttendWord, args.tokens);
  const std::int64_t tiles = args.batch * args.key_heads * work.tiles;
  if (tiles >= kAlone) {
    Dynamic::run(
        parallel, tiles, [](void* w, std::int64_t item) { static_cast<const Work*>(w)->whole_item(item); }, &work);
    return;
  }
  work.found = scratch(Scratch::kPartials, tiles * work.found_floats());
  const std::int64_t rows = args.batch * args.heads * args.tokens;
  Dynamic::run(
      rows * work.words * kAttendWord * args.width < kTinyMacs ? serial() : parallel, tiles * work.splits,
      [](void* w, std::int64_t item) { static_cast<const Work*>(w)->split_item(item); }, &work);
  Dynamic::run(
      rows * work.splits * work.ld < kTinyMacs ? serial() : parallel, tiles,
      [](void* w, std::int64_t item) { static_cast<const Work*>(w)->combine_item(item); }, &work);
}

}  // namespace pi2
