// Splits the positions into work items and puts their results together: see pi2/attention.h.
#include "pi2/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

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

struct Work {
  const AttentionArgs& args;
  AttendFn attend;
  std::int64_t group, rows, ld;  // rows of a key head: tokens * group, token by token
  std::int64_t words, splits;    // as far as any token sees
  const float* q;                // [batch, key_heads, rows, ld]
  std::uint64_t* mask;           // [batch, tokens, words]
  float *max, *sum, *y;          // [batch, key_heads, splits, rows], y: [., ld]

  const char* at(const void* data, const std::int64_t (&strides)[3], std::int64_t b, std::int64_t head) const {
    return static_cast<const char*>(data) + (b * strides[0] + head * strides[1]) * row_bytes(args.dtype, 1);
  }

  void split(std::int64_t item) const {
    const std::int64_t s = item % splits, head = item / splits % args.key_heads, b = item / splits / args.key_heads;
    AttendArgs a;
    a.tokens = args.tokens;
    a.group = group;
    a.width = args.width;
    a.ld = ld;
    a.q = q + (b * args.key_heads + head) * rows * ld;
    a.key = at(args.key, args.key_strides, b, head);
    a.value = at(args.value, args.value_strides, b, head);
    a.key_stride = args.key_strides[2] * row_bytes(args.dtype, 1);
    a.value_stride = args.value_strides[2] * row_bytes(args.dtype, 1);
    a.mask = mask + b * args.tokens * words;
    a.words = words;
    a.begin = s * kSplitWords;
    a.end = std::min(words, a.begin + kSplitWords);
    a.scale = args.scale;
    a.scores = scratch(Scratch::kScores, rows * kAttendWord);
    a.max = max + item * rows;
    a.sum = sum + item * rows;
    a.y = y + item * rows * ld;
    std::fill_n(a.max, rows, kNone);
    std::fill_n(a.sum, rows, 0.0f);
    std::fill_n(a.y, rows * ld, 0.0f);
    attend(a);
  }

  // Row by row of all key heads; the splits in order. Where nothing was seen, nothing is added.
  void combine(std::int64_t row) const {
    const std::int64_t r = row % rows, head = row / rows % args.key_heads, b = row / rows / args.key_heads;
    const std::int64_t first = (b * args.key_heads + head) * splits;
    float top = kNone;
    for (std::int64_t s = 0; s < splits; ++s) top = std::max(top, max[(first + s) * rows + r]);
    float total = 0, *out = scratch(Scratch::kScores, ld);
    std::fill_n(out, ld, 0.0f);
    for (std::int64_t s = 0; s < splits; ++s) {
      const std::int64_t at = (first + s) * rows + r;
      if (sum[at] == 0) continue;
      const float factor = std::exp(max[at] - top);
      total += factor * sum[at];
      for (std::int64_t k = 0; k < args.width; ++k) out[k] += factor * y[at * ld + k];
    }
    if (total != 0)
      for (std::int64_t k = 0; k < args.width; ++k) out[k] /= total;
    const std::int64_t n = head * group + r % group, place = (b * args.tokens + r / group) * args.heads + n;
    narrow(out, static_cast<char*>(args.y) + place * row_bytes(args.dtype, args.width), args.dtype, args.width);
  }
};

// Words of 64 positions up to the last that anyone sees.
std::int64_t seen_words(const AttentionArgs& args) {
  if (args.mask == nullptr) return (args.length + kAttendWord - 1) / kAttendWord;
  std::int64_t seen = 0;
  for (std::int64_t b = 0; b < args.batch; ++b) {
    for (std::int64_t t = 0; t < args.tokens; ++t) {
      const std::uint8_t* mask = args.mask + b * args.mask_strides[0] + t * args.mask_strides[1];
      std::int64_t last = args.length;
      while (last > seen && mask[last - 1] == 0) --last;
      seen = last;
    }
  }
  return (seen + kAttendWord - 1) / kAttendWord;
}

void pack_mask(const AttentionArgs& args, std::int64_t words, std::uint64_t* out) {
  for (std::int64_t b = 0; b < args.batch; ++b) {
    for (std::int64_t t = 0; t < args.tokens; ++t) {
      const std::uint8_t* mask = args.mask + b * args.mask_strides[0] + t * args.mask_strides[1];
      for (std::int64_t w = 0; w < words; ++w) {
        const std::int64_t first = w * kAttendWord, count = std::min(kAttendWord, args.length - first);
        std::uint64_t word = count == kAttendWord ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
        if (args.mask != nullptr) {
          word = 0;
          for (std::int64_t i = 0; i < count; ++i) word |= static_cast<std::uint64_t>(mask[first + i] != 0) << i;
        }
        *out++ = word;
      }
    }
  }
}

// [batch, key_heads, tokens, group, ld], what is beyond width zero.
void widen_queries(const Work& work, float* out) {
  const AttentionArgs& args = work.args;
  for (std::int64_t b = 0; b < args.batch; ++b) {
    for (std::int64_t head = 0; head < args.key_heads; ++head) {
      for (std::int64_t r = 0; r < work.rows; ++r, out += work.ld) {
        const char* q = work.at(args.query, args.query_strides, b, head * work.group + r % work.group) +
                        r / work.group * args.query_strides[2] * row_bytes(args.dtype, 1);
        widen(q, args.dtype, out, args.width);
        std::fill(out + args.width, out + work.ld, 0.0f);
      }
    }
  }
}

}  // namespace

void attention(const AttentionArgs& args, const ParallelFor& parallel) {
  const std::int64_t group = args.heads / args.key_heads, rows = args.tokens * group;
  const std::int64_t ld = (args.width + kAttendPad - 1) / kAttendPad * kAttendPad;
  const std::int64_t words = seen_words(args), splits = (words + kSplitWords - 1) / kSplitWords;
  const TraceSpan span(Stage::kAttention, words * kAttendWord, args.tokens);
  const std::int64_t heads = args.batch * args.key_heads, items = heads * splits;
  float* q = scratch(Scratch::kInput, heads * rows * ld);
  float* memory = scratch(Scratch::kPartials, items * rows * (ld + 2));
  auto* mask = reinterpret_cast<std::uint64_t*>(scratch(Scratch::kMask, 2 * args.batch * args.tokens * words));
  Work work{args,
            kernels().attend[static_cast<int>(args.dtype)],
            group,
            rows,
            ld,
            words,
            splits,
            q,
            mask,
            memory + items * rows * ld,
            memory + items * rows * (ld + 1),
            memory};
  widen_queries(work, q);
  pack_mask(args, words, mask);
  const bool tiny = heads * rows * words * kAttendWord * args.width < kTinyMacs;
  Dynamic::run(
      tiny ? serial() : parallel, items, [](void* w, std::int64_t item) { static_cast<const Work*>(w)->split(item); },
      &work);
  Dynamic::run(
      items * rows * ld < kTinyMacs ? serial() : parallel, heads * rows,
      [](void* w, std::int64_t row) { static_cast<const Work*>(w)->combine(row); }, &work);
}

}  // namespace pi2
