// Work items are tiles of queries. If there are few tiles, splits of the positions are work items of their own, whose
// results are combined: see pi2/attention.h.
#include "pi2/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/convert.h"
#include "base/parallel.h"
#include "base/scratch.h"
#include "base/trace.h"
#include "pi2/kernels.h"

namespace pi2 {
namespace {

constexpr std::int64_t kSplitWords = kAttentionSplit / kAttendWord;
constexpr std::int64_t kTinyMacs = 1 << 16;  // waking a thread costs a few microseconds
constexpr float kNone = -std::numeric_limits<float>::infinity();

// One bit for each of eight bytes: whether it is nonzero.
std::uint64_t bits_of(const std::uint8_t* bytes) {
  std::uint64_t x;
  std::memcpy(&x, bytes, sizeof(x));
  x = ((x & 0x7f7f7f7f7f7f7f7f) + 0x7f7f7f7f7f7f7f7f) | x;
  return ((x >> 7 & 0x0101010101010101) * 0x0102040810204080) >> 56;
}

std::uint64_t lowest_bits(std::int64_t count) {
  return count == kAttendWord ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
}

// Results of the splits of a tile: [splits, rows], y: [., ld].
struct Found {
  float *max, *sum, *y;
};

// The queries of one key head and some tokens, and the positions that they see.
struct Tile {
  std::int64_t b, head, token, tokens, rows;  // rows: tokens * group, token by token
  std::uint64_t* mask = nullptr;              // [tokens, ld_mask]
  std::int64_t ld_mask = 0, words = 0;
  std::int64_t first = 0, splits = 0;  // splits with positions that are seen
};

struct Work {
  const AttentionArgs& args;
  AttendFn attend;
  std::int64_t group, ld;
  std::int64_t tile_tokens, tiles;  // of a key head: as many tokens as have kAttentionRows queries
  // If splits are work items: masks and results of all tiles.
  Tile* shared = nullptr;
  float* found = nullptr;
  std::int64_t most_splits = 0;

  // Keys or values of a sequence and head.
  const char* cache_at(const void* data, const std::int64_t (&strides)[3], std::int64_t b, std::int64_t head) const {
    const std::int64_t lane = args.lanes == nullptr ? b : args.lanes[b];
    return static_cast<const char*>(data) + (lane * strides[0] + head * strides[1]) * kv_unit_bytes(args.kv_dtype);
  }

  // The end of the positions that a token may see.
  std::int64_t end_of(std::int64_t b, std::int64_t token) const {
    if (args.mask != nullptr) return args.length;
    if (args.positions != nullptr) return std::min(args.positions[b * args.tokens + token] + 1, args.length);
    return args.causal ? std::min(token + 1, args.length) : args.length;
  }

  // A tile without its mask.
  Tile tile(std::int64_t index) const {
    const std::int64_t token = index % tiles * tile_tokens, tokens = std::min(tile_tokens, args.tokens - token);
    Tile t{index / tiles / args.key_heads, index / tiles % args.key_heads, token, tokens, tokens * group};
    std::int64_t end = 0;
    for (std::int64_t i = 0; i < tokens; ++i) end = std::max(end, end_of(t.b, token + i));
    t.ld_mask = (end + kAttendWord - 1) / kAttendWord;
    return t;
  }

  // Fills in the mask and the range of splits.
  void see(Tile& t, std::uint64_t* mask) const {
    t.mask = mask;
    std::int64_t begin = t.ld_mask;
    for (std::int64_t i = 0; i < t.tokens; ++i) {
      std::uint64_t* row = mask + i * t.ld_mask;
      pack(t.b, t.token + i, row, t.ld_mask);
      std::int64_t last = t.ld_mask;
      while (last > t.words && row[last - 1] == 0) --last;
      t.words = last;
      begin = std::min(begin, std::find_if(row, row + begin, [](std::uint64_t word) { return word != 0; }) - row);
    }
    t.first = begin / kSplitWords;
    t.splits = std::max<std::int64_t>(0, (t.words + kSplitWords - 1) / kSplitWords - t.first);
  }

  void pack(std::int64_t b, std::int64_t token, std::uint64_t* out, std::int64_t words) const {
    const std::uint8_t* mask = args.mask + b * args.mask_strides[0] + token * args.mask_strides[1];
    const std::int64_t end = end_of(b, token),
                       begin = args.window == 0 ? 0 : std::max<std::int64_t>(0, end - args.window);
    for (std::int64_t w = 0; w < words; ++w) {
      const std::int64_t first = w * kAttendWord, count = std::clamp<std::int64_t>(end - first, 0, kAttendWord);
      const std::int64_t skipped = std::clamp<std::int64_t>(begin - first, 0, kAttendWord);
      std::uint64_t word = lowest_bits(count) & ~lowest_bits(skipped);
      if (args.mask != nullptr) {
        word = 0;
        std::int64_t i = 0;
        for (; i + 8 <= count; i += 8) word |= bits_of(mask + first + i) << i;
        for (; i < count; ++i) word |= static_cast<std::uint64_t>(mask[first + i] != 0) << i;
      }
      out[w] = word;
    }
  }

  std::int64_t found_floats(std::int64_t splits) const { return splits * tile_tokens * group * (ld + 2); }

  Found found_at(float* memory, std::int64_t splits) const {
    const std::int64_t rows = splits * tile_tokens * group;
    return {memory, memory + rows, memory + 2 * rows};
  }

  // The queries [tokens, group, ld], zero beyond width.
  float* queries(const Tile& t) const {
    float *q = scratch(Scratch::kInput, t.rows * ld), *out = q;
    for (std::int64_t r = 0; r < t.rows; ++r, out += ld) {
      const std::int64_t *strides = args.query_strides, n = t.head * group + r % group;
      const std::int64_t place = t.b * strides[0] + n * strides[1] + (t.token + r / group) * strides[2];
      widen(static_cast<const char*>(args.query) + row_bytes(args.dtype, place), args.dtype, out, args.width);
      if (args.rotated) rotate(out, args.width);
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
    a.key = cache_at(args.key, args.key_strides, t.b, t.head);
    a.value = cache_at(args.value, args.value_strides, t.b, t.head);
    a.key_stride = kv_unit_bytes(args.kv_dtype) * args.key_strides[2];
    a.value_stride = kv_unit_bytes(args.kv_dtype) * args.value_strides[2];
    a.mask = t.mask;
    a.words = t.ld_mask;
    a.begin = (t.first + s) * kSplitWords;
    a.end = std::min(t.words, a.begin + kSplitWords);
    a.scale = args.scale;
    a.softcap = args.softcap;
    const std::int64_t unpacked = args.kv_dtype == DType::kQ4 ? kAttendWord * groups(args.width) * kGroup : 0;
    a.scores = scratch(Scratch::kScores, t.rows * kAttendWord + unpacked);
    a.unpacked = a.scores + t.rows * kAttendWord;
    a.max = found.max + s * t.rows;
    a.sum = found.sum + s * t.rows;
    a.y = found.y + s * t.rows * ld;
    std::fill_n(a.max, t.rows, kNone);
    std::fill_n(a.sum, t.rows, 0.0f);
    std::fill_n(a.y, t.rows * ld, 0.0f);
    attend(a);
  }

  // Combines the splits of each row in order. Splits without visible positions add nothing.
  void combine(const Tile& t, const Found& found) const {
    float* out = scratch(Scratch::kScores, ld);
    for (std::int64_t r = 0; r < t.rows; ++r) {
      const std::int64_t n = t.head * group + r % group;
      float top = args.sinks == nullptr ? kNone : args.sinks[n];
      for (std::int64_t s = 0; s < t.splits; ++s) top = std::max(top, found.max[s * t.rows + r]);
      float total = args.sinks == nullptr ? 0 : std::exp(args.sinks[n] - top);
      std::fill_n(out, ld, 0.0f);
      for (std::int64_t s = 0; s < t.splits; ++s) {
        const std::int64_t at = s * t.rows + r;
        if (found.sum[at] == 0) continue;
        const float factor = std::exp(found.max[at] - top);
        total += factor * found.sum[at];
        for (std::int64_t k = 0; k < args.width; ++k) out[k] += factor * found.y[at * ld + k];
      }
      if (total != 0)
        for (std::int64_t k = 0; k < args.width; ++k) out[k] /= total;
      if (args.rotated) rotate(out, args.width);
      const std::int64_t place = (t.b * args.tokens + t.token + r / group) * args.heads + n;
      narrow(out, static_cast<char*>(args.y) + place * row_bytes(args.dtype, args.width), args.dtype, args.width);
    }
  }

  void split_item(std::int64_t item) const {
    const Tile& t = shared[item / most_splits];
    if (item % most_splits < t.splits) split(t, item % most_splits, queries(t), found_of(item / most_splits));
  }

  void combine_item(std::int64_t item) const { combine(shared[item], found_of(item)); }

  Found found_of(std::int64_t tile) const {
    return found_at(found + tile * found_floats(most_splits), shared[tile].splits);
  }

  void whole_item(std::int64_t item) const {
    // Tiles that see most come first, so that no thread ends with a long one.
    Tile t = tile(item / tiles * tiles + tiles - 1 - item % tiles);
    see(t, reinterpret_cast<std::uint64_t*>(scratch(Scratch::kMask, 2 * t.tokens * t.ld_mask)));
    const Found here = found_at(scratch(Scratch::kPartials, found_floats(t.splits)), t.splits);
    const float* q = queries(t);
    for (std::int64_t s = 0; s < t.splits; ++s) split(t, s, q, here);
    combine(t, here);
  }
};

}  // namespace

void attention(const AttentionArgs& args, const ParallelFor& parallel) {
  const TraceSpan span(Stage::kAttention, args.length, args.tokens);
  Work work{args, kernels().attend[static_cast<int>(args.kv_dtype)]};
  work.group = args.heads / args.key_heads;
  work.ld = (args.width + kAttendPad - 1) / kAttendPad * kAttendPad;
  work.tile_tokens = std::clamp<std::int64_t>(kAttentionRows / work.group, 1, args.tokens);
  work.tiles = (args.tokens + work.tile_tokens - 1) / work.tile_tokens;
  const std::int64_t tiles = args.batch * args.key_heads * work.tiles;
  if (tiles >= 2 * std::max(1, parallel.threads)) {  // enough tiles for all threads
    const bool tiny = args.batch * args.heads * args.tokens * args.length * args.width < kTinyMacs;
    Dynamic::run(
        tiny ? serial() : parallel, tiles,
        [](void* w, std::int64_t item) { static_cast<const Work*>(w)->whole_item(item); }, &work);
    return;
  }
  std::vector<Tile> shared;
  const std::int64_t words = (args.length + kAttendWord - 1) / kAttendWord;
  auto* masks = reinterpret_cast<std::uint64_t*>(scratch(Scratch::kMask, 2 * tiles * work.tile_tokens * words));
  for (std::int64_t i = 0; i < tiles; ++i) {
    shared.push_back(work.tile(i));
    work.see(shared.back(), masks + i * work.tile_tokens * words);
    work.most_splits = std::max(work.most_splits, shared.back().splits);
  }
  work.shared = shared.data();
  work.found = scratch(Scratch::kPartials, tiles * work.found_floats(work.most_splits));
  const std::int64_t rows = args.batch * args.heads * args.tokens, seen = work.most_splits * kAttentionSplit;
  Dynamic::run(
      rows * seen * args.width < kTinyMacs ? serial() : parallel, tiles * work.most_splits,
      [](void* w, std::int64_t item) { static_cast<const Work*>(w)->split_item(item); }, &work);
  Dynamic::run(
      rows * work.most_splits * work.ld < kTinyMacs ? serial() : parallel, tiles,
      [](void* w, std::int64_t item) { static_cast<const Work*>(w)->combine_item(item); }, &work);
}

}  // namespace pi2
