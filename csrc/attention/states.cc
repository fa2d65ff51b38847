#include "pi2/states.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/convert.h"
#include "base/for_each_cpu.h"
#include "base/parallel.h"
#include "base/scratch.h"

namespace pi2 {
namespace {

constexpr std::int64_t kTinyNumbers = 1 << 14;  // waking a thread costs a few microseconds
constexpr int kLanes = 16;                      // sums of a row, which compilers keep in vectors

float sum_of(const float (&lanes)[kLanes]) {
  float sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

PI2_FOR_EACH_CPU float dot(const float* x, const float* y, std::int64_t n) {
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += x[i + l] * y[i + l];
  for (int l = 0; i < n; ++i, ++l) lanes[l] += x[i] * y[i];
  return sum_of(lanes);
}

// s = s decay + v k + added b; returns s r.
PI2_FOR_EACH_CPU float step_row(float* s, const float* decay, float v, const float* k, float added, const float* b,
                                const float* r, std::int64_t n) {
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const float now = s[i + l] * decay[i + l] + v * k[i + l] + added * b[i + l];
      s[i + l] = now;
      lanes[l] += now * r[i + l];
    }
  }
  for (int l = 0; i < n; ++i, ++l) {
    const float now = s[i] * decay[i] + v * k[i] + added * b[i];
    s[i] = now;
    lanes[l] += now * r[i];
  }
  return sum_of(lanes);
}

PI2_FOR_EACH_CPU void add_to(float* y, const float* x, float factor, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += x[i] * factor;
}

// A column of all rows: s = s decay + v k + added b; y += s r.
PI2_FOR_EACH_CPU void step_column(float* s, float decay, const float* v, float k, const float* added, float b, float r,
                                  float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float now = s[i] * decay + v[i] * k + added[i] * b;
    s[i] = now;
    y[i] += now * r;
  }
}

// The operands of one head. decay, b: [width]; a: [width] or null.
struct Head {
  std::int64_t rows, width;
  float* state;
  const float *decay, *v, *k, *r, *a, *b;
  float* y;
};

// S[p, :] is dense.
void by_rows(const Head& head) {
  for (std::int64_t p = 0; p < head.rows; ++p) {
    float* s = head.state + p * head.width;
    const float added = head.a == nullptr ? 0 : dot(s, head.a, head.width);
    head.y[p] = step_row(s, head.decay, head.v[p], head.k, added, head.b, head.r, head.width);
  }
}

// S[:, i] is dense. `added`: room for a number of each row.
void by_columns(const Head& head, float* added) {
  std::fill_n(added, head.rows, 0.0f);
  std::fill_n(head.y, head.rows, 0.0f);
  for (std::int64_t i = 0; head.a != nullptr && i < head.width; ++i)
    add_to(added, head.state + i * head.rows, head.a[i], head.rows);
  for (std::int64_t i = 0; i < head.width; ++i)
    step_column(head.state + i * head.rows, head.decay[i], head.v, head.k[i], added, head.b[i], head.r[i], head.y,
                head.rows);
}

template <class Body>
void run(const ParallelFor& parallel, std::int64_t n, std::int64_t numbers, Body body) {
  if (numbers < kTinyNumbers) {
    for (std::int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  Dynamic::run(parallel, n, [](void* self, std::int64_t i) { (*static_cast<Body*>(self))(i); }, &body);
}

}  // namespace

void recurrence(const RecurrenceArgs& args, const ParallelFor& parallel) {
  const std::int64_t size = args.rows * args.width;
  run(parallel, args.batch * args.heads, args.batch * args.heads * size, [&](std::int64_t index) {
    const std::int64_t sequence = index / args.heads, heads = args.heads / args.groups;
    const std::int64_t group = sequence * args.groups + index % args.heads / heads, at = index * args.width;
    float* decay = scratch(Scratch::kInput, 2 * args.width + args.rows);
    float *zeros = decay + args.width, *added = zeros + args.width;
    if (args.one_decay) std::fill_n(decay, args.width, args.decay[index]);
    if (args.b == nullptr) std::fill_n(zeros, args.width, 0.0f);
    const Head head{args.rows,
                    args.width,
                    args.state + index * size,
                    args.one_decay ? decay : args.decay + at,
                    args.v + index * args.rows,
                    args.k + group * args.width,
                    args.r + group * args.width,
                    args.a == nullptr ? nullptr : args.a + at,
                    args.b == nullptr ? zeros : args.b + at,
                    args.y + index * args.rows};
    if (args.transposed)
      by_columns(head, added);
    else
      by_rows(head);
  });
}

void conv_step(const ConvStepArgs& args, const ParallelFor& parallel) {
  constexpr std::int64_t kChannels = 256;  // of a work item
  const std::int64_t items = (args.channels + kChannels - 1) / kChannels, number = row_bytes(args.dtype, 1);
  const std::int64_t length = args.length, taps = args.taps;
  run(parallel, args.batch * items, args.batch * args.channels * (length + taps), [&](std::int64_t index) {
    const std::int64_t sequence = index / items, first = index % items * kChannels;
    const std::int64_t count = std::min(kChannels, args.channels - first), at = sequence * args.channels + first;
    float* weight = scratch(Scratch::kInput, count * (taps + length + 2) + length + 1);
    float *state = weight + count * taps, *x = state + count * length, *y = x + count, *seen = y + count;
    const auto take = [&](const void* data, std::int64_t place, float* to, std::int64_t numbers) {
      widen(static_cast<const char*>(data) + place * number, args.dtype, to, numbers);
    };
    take(args.weight, first * taps, weight, count * taps);
    take(args.state, at * length, state, count * length);
    take(args.x, at, x, count);
    std::memset(y, 0, count * sizeof(float));
    if (args.bias != nullptr) take(args.bias, first, y, count);
    for (std::int64_t c = 0; c < count; ++c) {
      float* before = state + c * length;
      std::copy_n(before, length, seen);
      seen[length] = x[c];
      for (std::int64_t t = 0; t < taps; ++t) y[c] += weight[c * taps + t] * seen[length + 1 - taps + t];
      std::copy_n(seen + 1, length, before);
    }
    if (args.silu)
      for (std::int64_t c = 0; c < count; ++c) y[c] = y[c] / (1 + std::exp(-y[c]));
    narrow(state, static_cast<char*>(args.state) + at * length * number, args.dtype, count * length);
    narrow(y, static_cast<char*>(args.y) + at * number, args.dtype, count);
  });
}

}  // namespace pi2
