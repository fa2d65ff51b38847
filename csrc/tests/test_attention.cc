// Attention over a cache whose memory ends with the last position that is seen: against sums in double, and the same
// bits with any number of threads, token by token and sequence by sequence.
#include "pi2/attention.h"

#include <algorithm>
#include <cmath>

#include "base/convert.h"
#include "pi2/thread_pool.h"
#include "tests/check.h"
#include "tests/guarded.h"
#include "tests/random.h"

namespace {

using pi2::AttentionArgs;
using pi2::DType;
using namespace pi2_test;

struct Case {
  AttentionArgs args;
  std::vector<char> query;
  Guarded key, value;
  std::vector<std::uint8_t> mask;
  std::vector<std::int64_t> lanes, positions;

  // `used` positions, of which each token sees those before it, in the last sequence all but the first two of them.
  Case(std::mt19937& rng, DType dtype, DType kv, std::int64_t batch, std::int64_t key_heads, std::int64_t group,
       std::int64_t tokens, std::int64_t used, std::int64_t width)
      : query(stored(rng, dtype, batch * key_heads * group * tokens * width)),
        key(kv_rows(rng, kv, batch * key_heads * used, width).data(),
            batch * key_heads * used * pi2::kv_row_bytes(kv, width)),
        value(kv_rows(rng, kv, batch * key_heads * used, width).data(), key.size()),
        mask(static_cast<std::size_t>(batch * tokens * (used + 70))) {
    const std::int64_t heads = key_heads * group, length = used + 70;  // the rest of the cache is no memory
    args.dtype = dtype;
    args.kv_dtype = kv;
    args.batch = batch;
    args.heads = heads;
    args.key_heads = key_heads;
    args.tokens = tokens;
    args.length = length;
    args.width = width;
    args.query = query.data();
    args.key = key.data();
    args.value = value.data();
    args.mask = mask.data();
    args.scale = 0.2f;
    const std::int64_t q_strides[] = {heads * tokens * width, tokens * width, width};
    const std::int64_t row = pi2::kv_row_bytes(kv, width) / pi2::kv_unit_bytes(kv);
    const std::int64_t kv_strides[] = {key_heads * used * row, used * row, row};
    std::copy_n(q_strides, 3, args.query_strides);
    std::copy_n(kv_strides, 3, args.key_strides);
    std::copy_n(kv_strides, 3, args.value_strides);
    args.mask_strides[0] = tokens * length;
    args.mask_strides[1] = length;
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t l = b + 1 == batch ? 2 : 0; l <= used - tokens + t; ++l)
          mask[(b * tokens + t) * length + l] = 1;
  }

  // The same of positions and a window (0: none), of sequences in another order, instead of a mask, which is changed
  // to say the same.
  void by_position(std::int64_t window) {
    const std::int64_t used = args.length - 70;
    for (std::int64_t b = 0; b < args.batch; ++b) {
      lanes.push_back(args.batch - 1 - b);
      for (std::int64_t t = 0; t < args.tokens; ++t) {
        positions.push_back(used - args.tokens + t);
        for (std::int64_t l = 0; l < args.length; ++l)
          mask[(b * args.tokens + t) * args.length + l] =
              l <= positions.back() && (window == 0 || l > positions.back() - window);
      }
    }
    args.lanes = lanes.data();
    args.positions = positions.data();
    args.window = window;
    args.mask = nullptr;
  }

  std::vector<char> run(const pi2::ParallelFor& parallel) {
    std::vector<char> y(query.size());
    args.y = y.data();
    pi2::attention(args, parallel);
    return y;
  }
};

void check_values(const Case& c, const std::vector<char>& y) {
  if (kThreadSanitizer) return;
  const AttentionArgs& a = c.args;
  for (std::int64_t row = 0; row < a.batch * a.tokens * a.heads; ++row) {
    const std::int64_t n = row % a.heads, t = row / a.heads % a.tokens, b = row / a.heads / a.tokens;
    const std::int64_t head = n / (a.heads / a.key_heads), lane = a.lanes == nullptr ? b : a.lanes[b];
    const std::int64_t q = b * a.query_strides[0] + n * a.query_strides[1] + t * a.query_strides[2];
    const std::int64_t bytes = pi2::kv_row_bytes(a.kv_dtype, a.width), used = a.length - 70;
    const std::int64_t kv = (lane * a.key_heads + head) * used * bytes;
    std::vector<double> wanted(static_cast<std::size_t>(a.width));
    double total = a.sinks == nullptr ? 0 : std::exp(static_cast<double>(a.sinks[n]));
    for (std::int64_t l = 0; l < used; ++l) {
      if (c.mask[(b * a.tokens + t) * a.length + l] == 0) continue;
      const char* keys = c.key.data() + kv + l * bytes;
      const char* values = c.value.data() + kv + l * bytes;
      double score = 0;
      for (std::int64_t k = 0; k < a.width; ++k)
        score += pi2::load_float(a.query, a.dtype, q + k) * kv_number(keys, a.kv_dtype, a.width, k);
      score *= a.scale;
      const double weight = std::exp(a.softcap == 0 ? score : a.softcap * std::tanh(score / a.softcap));
      total += weight;
      for (std::int64_t k = 0; k < a.width; ++k) wanted[k] += weight * kv_number(values, a.kv_dtype, a.width, k);
    }
    for (std::int64_t k = 0; k < a.width; ++k) {
      const double found = pi2::load_float(y.data(), a.dtype, row * a.width + k);
      const double off = a.dtype == DType::kF32 ? 1e-5 : a.dtype == DType::kF16 ? 2e-3 : 2e-2;
      PI2_CHECK(std::fabs(found - wanted[k] / total) <= off, "dtype %d of %d: %g, wanted %g", static_cast<int>(a.dtype),
                static_cast<int>(a.kv_dtype), found, wanted[k] / total);
    }
  }
}

// The first token alone, and the last sequence alone.
void check_alone(const Case& c, const std::vector<char>& y) {
  const std::int64_t token_bytes = c.args.heads * pi2::row_bytes(c.args.dtype, c.args.width);
  std::vector<char> alone(static_cast<std::size_t>(c.args.tokens * token_bytes));
  AttentionArgs a = c.args;
  a.y = alone.data();
  a.tokens = a.batch = 1;
  pi2::attention(a, pi2::serial());
  PI2_CHECK(std::memcmp(alone.data(), y.data(), static_cast<std::size_t>(token_bytes)) == 0, "a token alone differs");
  a.tokens = c.args.tokens;
  const std::int64_t bytes = pi2::row_bytes(a.dtype, 1), last = c.args.batch - 1;
  a.query = static_cast<const char*>(a.query) + last * a.query_strides[0] * bytes;
  a.key = static_cast<const char*>(a.key) + last * a.key_strides[0] * bytes;
  a.value = static_cast<const char*>(a.value) + last * a.value_strides[0] * bytes;
  a.mask += last * a.mask_strides[0];
  pi2::attention(a, pi2::serial());
  PI2_CHECK(std::memcmp(alone.data(), y.data() + last * a.tokens * token_bytes, alone.size()) == 0,
            "a sequence alone differs");
}

}  // namespace

int main() {
  std::mt19937 rng(1);
  long cases = 0;
  pi2::ThreadPool two(2), five(5);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const std::int64_t used : {5, 64, 130, 1100}) {
      for (const std::int64_t group : {1, 4, 6}) {
        for (const std::int64_t tokens : {3, 100}) {  // the splits of few tiles are shared among threads, tiles of many
          if (tokens + 2 > used) continue;
          Case c(rng, dtype, dtype, 2, tokens > 64 ? 3 : 2, group, tokens, used, 24);  // 12 tiles or more, or 4
          const std::vector<char> y = c.run(pi2::serial());
          check_values(c, y);
          check_alone(c, y);
          PI2_CHECK(c.run(two.parallel()) == y && c.run(five.parallel()) == y, "threads change bits");
          ++cases;
        }
      }
    }
  }
  for (const DType kv : {DType::kF32, DType::kF16, DType::kI8, DType::kQ4}) {
    for (const std::int64_t used : {5, 64, 130, 1700}) {
      for (const std::int64_t window : {0, 1, 60, 600}) {
        for (const std::int64_t tokens : {1, 3, 100}) {
          if (tokens + 2 > used) continue;
          if (tokens * used > 100000 && kv != DType::kF16) continue;  // the sums in double take long
          Case c(rng, DType::kF32, kv, 2, tokens > 64 ? 3 : 2, 4, tokens, used, 24);
          c.by_position(window);
          c.args.softcap = window == 60 ? 3 : 0;
          const std::vector<float> sinks = {-30, 0.5f, 2, 9, -1, 0, 1, 40, 3, -2, 0.1f, 5};
          c.args.sinks = used == 130 ? sinks.data() : nullptr;
          const std::vector<char> y = c.run(pi2::serial());
          check_values(c, y);
          PI2_CHECK(c.run(two.parallel()) == y && c.run(five.parallel()) == y, "threads change bits");
          c.args.positions = nullptr;  // the mask says the same
          c.args.mask = c.mask.data();
          c.args.window = 0;
          PI2_CHECK(c.run(pi2::serial()) == y, "positions differ from a mask");
          ++cases;
        }
      }
    }
  }
  return finish("test_attention", cases);
}
