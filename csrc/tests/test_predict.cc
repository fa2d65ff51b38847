// Predictors on every instruction set: scores against sums in double, sign counts against counting; bits do not depend
// on threads or company; a predicted layer is its prediction followed by the layer, slice by slice; calls are timed.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "base/timings.h"
#include "ffn/signs.h"
#include "kernels/scalar/quantized.h"
#include "pi2/kernels.h"
#include "pi2/predict.h"
#include "pi2/thread_pool.h"
#include "tests/check.h"
#include "tests/random.h"

namespace {

using namespace pi2;
using namespace pi2_test;

// `count` rows of n weights of any predictor dtype, and what they mean.
struct Rows {
  std::vector<char> bytes;
  std::vector<float> scale, values;

  Rows(std::mt19937& rng, DType dtype, std::int64_t count, std::int64_t n, float size) {
    const std::int64_t row = row_bytes(dtype, n);
    for (std::int64_t i = 0; i < count * row; ++i) bytes.push_back(static_cast<char>(rng()));
    scale.assign(static_cast<std::size_t>(count), size);
    for (std::int64_t r = 0; r < count; ++r) {
      char* data = bytes.data() + r * row;
      for (std::int64_t g = 0; is_quantized(dtype) && g < groups(n); ++g) {
        const std::uint16_t half = narrow_f16(size * static_cast<float>(1 + rng() % 3));
        std::memcpy(data + row - 2 * (groups(n) - g), &half, sizeof(half));
      }
      for (std::int64_t k = 0; k < n; ++k) {
        const std::int64_t g = k / kGroup, at = k % kGroup;
        values.push_back(
            dtype == DType::kI8 ? static_cast<float>(static_cast<std::int8_t>(data[k])) * size
            : dtype == DType::kQ4
                ? static_cast<float>(scalar::Q4::at(data, g, at)) * scalar::scale_of<scalar::Q4>(data, n, g)
                : static_cast<float>(scalar::Q8::at(data, g, at)) * scalar::scale_of<scalar::Q8>(data, n, g));
      }
    }
  }
};

// x[n] as int8 activations see it.
std::vector<double> rounded(const float* x, std::int64_t n, bool int8_activations) {
  std::vector<double> out(x, x + n);
  if (!int8_activations) return out;
  std::vector<float> memory(static_cast<std::size_t>(padded(n)));
  scalar::prepare_a8(x, n, memory.data());
  const auto* values = reinterpret_cast<const std::int8_t*>(memory.data());
  const auto* scales = reinterpret_cast<const float*>(values + padded(n));
  for (std::int64_t k = 0; k < n; ++k)
    out[static_cast<std::size_t>(k)] = static_cast<double>(values[k]) * scales[k / kGroup];
  return out;
}

long check_lowrank(std::mt19937& rng, ThreadPool& pool, DType dtype, bool int8_activations) {
  long cases = 0;
  const struct {
    std::int64_t hidden, rank, cold, tokens;
  } shapes[] = {{1, 1, 1, 1}, {77, 19, 1030, 5}, {320, 40, 700, 1}, {96, 33, 300, 70}};
  for (const auto& s : shapes) {
    const float size = dtype == DType::kQ4 ? 0.05f : 0.004f;
    const Rows a(rng, dtype, s.rank, s.hidden, size), b(rng, dtype, s.cold, s.rank, size);
    const std::vector<float> bias = floats(rng, s.cold), x = floats(rng, s.tokens * s.hidden);
    std::vector<std::uint8_t> active(static_cast<std::size_t>(s.tokens * s.cold), 9);
    LowrankArgs args;
    args.x = x.data();
    args.tokens = s.tokens;
    args.hidden = s.hidden;
    args.dtype = dtype;
    args.a = a.bytes.data();
    args.a_scale = dtype == DType::kI8 ? a.scale.data() : nullptr;
    args.rank = s.rank;
    args.b = b.bytes.data();
    args.b_scale = dtype == DType::kI8 ? b.scale.data() : nullptr;
    args.b_bias = bias.data();
    args.cold = s.cold;
    args.int8_activations = int8_activations;
    args.threshold = 0.1f;
    args.active = active.data();
    predict_lowrank(args, pool.parallel());
    long on = 0;
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      const std::vector<double> x_H = rounded(x.data() + t * s.hidden, s.hidden, int8_activations);
      std::vector<float> z_r;
      for (std::int64_t r = 0; r < s.rank; ++r) {
        double z = 0;
        for (std::int64_t k = 0; k < s.hidden; ++k)
          z += a.values[static_cast<std::size_t>(r * s.hidden + k)] * x_H[static_cast<std::size_t>(k)];
        z_r.push_back(static_cast<float>(std::fmax(z, 0)));
      }
      const std::vector<double> z_seen = rounded(z_r.data(), s.rank, int8_activations);
      for (std::int64_t c = 0; c < s.cold; ++c) {
        double score = bias[static_cast<std::size_t>(c)], magnitude = 1;
        for (std::int64_t r = 0; r < s.rank; ++r) {
          const double product =
              z_seen[static_cast<std::size_t>(r)] * b.values[static_cast<std::size_t>(c * s.rank + r)];
          score += product;
          magnitude += std::fabs(product);
        }
        // A z within rounding of half a step may go either way as int8.
        const double unsure = (int8_activations ? 1e-2 : 1e-5) * magnitude;
        const bool wanted = score >= 0.1, found = active[static_cast<std::size_t>(t * s.cold + c)] == 1;
        PI2_CHECK(wanted == found || std::fabs(score - 0.1) < unsure, "dtype %d a8 %d token %ld neuron %ld score %g",
                  static_cast<int>(dtype), int8_activations, static_cast<long>(t), static_cast<long>(c), score);
        on += found;
        ++cases;
      }
    }
    PI2_CHECK(s.cold == 1 || (on > 0 && on < s.tokens * s.cold), "%ld on", on);
    std::vector<std::uint8_t> again(active.size(), 9);
    for (std::int64_t t = 0; t < s.tokens; ++t) {  // alone, on one thread
      LowrankArgs one = args;
      one.x = x.data() + t * s.hidden;
      one.tokens = 1;
      one.active = again.data() + t * s.cold;
      predict_lowrank(one, serial());
    }
    PI2_CHECK(again == active, "dtype %d: company or threads change the prediction", static_cast<int>(dtype));
    args.doubt = 0.2f;  // those that a higher threshold leaves out are marked, others as before
    predict_lowrank(args, pool.parallel());
    std::vector<std::uint8_t> sure(active.size(), 9);
    LowrankArgs higher = args;
    higher.threshold += higher.doubt;
    higher.doubt = 0;
    higher.active = sure.data();
    predict_lowrank(higher, serial());
    for (std::size_t i = 0; i < active.size(); ++i) {
      const std::uint8_t expected = again[i] == 0 || sure[i] != 0 ? again[i] : kIfThere;
      PI2_CHECK(active[i] == expected, "dtype %d, mark %zu: %d", static_cast<int>(dtype), i, active[i]);
    }
    std::vector<float> broken(x.begin(), x.begin() + s.hidden);
    broken[0] = NAN;
    args.x = broken.data();
    args.tokens = 1;
    predict_lowrank(args, serial());
    for (std::int64_t c = 0; c < s.cold; ++c) PI2_CHECK(active[static_cast<std::size_t>(c)] == 1, "NaN is not seen");
  }
  return cases;
}

// Nothing to project: the bias alone decides, and nobody waits for a projection. The same without inputs.
long check_nothing_to_project(ThreadPool& pool) {
  long cases = 0;
  const std::vector<float> bias = {-1, 0, 1, NAN}, scale(4, 1.0f), x(5 * 33, 1.0f);
  const std::vector<std::uint8_t> wanted = {0, 0, 1, 1};
  const std::vector<char> rows(4 * 64, 1);
  for (const DType dtype : {DType::kI8, DType::kQ4, DType::kQ8}) {
    for (const std::int64_t rank : {0, 2}) {
      for (const bool threads : {false, true}) {
        LowrankArgs args;
        std::vector<std::uint8_t> active(5 * 4, 9);
        args.x = x.data();
        args.tokens = 5;
        args.hidden = rank == 0 ? 33 : 0;
        args.dtype = dtype;
        args.a = rank == 0 ? nullptr : rows.data();
        args.b = rows.data();
        args.a_scale = args.b_scale = dtype == DType::kI8 ? scale.data() : nullptr;
        args.rank = rank;
        args.b_bias = bias.data();
        args.cold = 4;
        args.int8_activations = dtype != DType::kI8 && threads;
        args.threshold = 0.5f;
        args.active = active.data();
        predict_lowrank(args, threads ? pool.parallel() : serial());
        for (std::size_t i = 0; i < active.size(); ++i)
          PI2_CHECK(active[i] == wanted[i % 4], "dtype %d rank %ld: %d", static_cast<int>(dtype),
                    static_cast<long>(rank), active[i]);
        ++cases;
      }
    }
  }
  return cases;
}

// Gate rows alone say what fires: the same bits, with fewer neurons asked for. Odd sizes, hot neurons, thresholds.
long check_gate(std::mt19937& rng, ThreadPool& pool) {
  long cases = 0;
  constexpr std::int64_t kHidden = 77, kNeurons = 1100;
  const std::vector<float> bias = floats(rng, kNeurons), cuts(kNeurons, 0.3f);
  for (const std::int64_t rows : {2, 3}) {
    for (const std::int64_t tokens : {1, 5, 11, 12}) {
      for (const std::int64_t n_hot : {0, 20}) {
        const std::vector<float> neurons = floats(rng, kNeurons * rows * kHidden), x = floats(rng, tokens * kHidden);
        std::vector<float> gates, plain(tokens * kHidden), gated(tokens * kHidden);
        for (std::int64_t i = 0; i < kNeurons; ++i)
          gates.insert(gates.end(), neurons.begin() + i * rows * kHidden, neurons.begin() + (i * rows + 1) * kHidden);
        FfnArgs args;
        args.x = x.data();
        args.y = plain.data();
        args.tokens = tokens;
        args.hidden = kHidden;
        args.neuron_rows = neurons.data();
        args.neurons = kNeurons;
        args.rows = rows;
        args.n_hot = n_hot;
        (rows == 3 ? args.bias_gate : args.bias_up) = bias.data();
        args.thresholds = n_hot == 0 ? cuts.data() : nullptr;
        sparse_ffn(args, serial());
        Predictor gate;
        gate.kind = Predictor::Kind::kGate;
        gate.gate_rows = gates.data();
        args.y = gated.data();
        predicted_ffn(gate, args, pool.parallel());
        PI2_CHECK(plain == gated, "%ld rows, %ld tokens, %ld hot", static_cast<long>(rows), static_cast<long>(tokens),
                  static_cast<long>(n_hot));
        std::vector<std::uint8_t> active(tokens * (kNeurons - n_hot), 9);
        predict_gate(args, gates.data(), active.data(), pool.parallel());
        const auto fires = std::count(active.begin(), active.end(), 1);
        PI2_CHECK(fires + std::count(active.begin(), active.end(), 0) == static_cast<long>(active.size()) &&
                      fires > 0 && fires < static_cast<long>(active.size()),
                  "%ld of %zu fire", static_cast<long>(fires), active.size());
        ++cases;
      }
    }
  }
  return cases;
}

// A call from inside a body runs there alone, and says the same.
long check_nested(std::mt19937& rng, ThreadPool& pool) {
  struct Nested {
    ThreadPool& pool;
    LowrankArgs args;
    std::vector<std::vector<std::uint8_t>> active;
  } nested{pool, {}, {}};
  constexpr std::int64_t kHidden = 160, kRank = 700, kCold = 900;
  const Rows a(rng, DType::kI8, kRank, kHidden, 0.01f), b(rng, DType::kI8, kCold, kRank, 0.01f);
  const std::vector<float> x = floats(rng, kHidden);
  nested.args.x = x.data();
  nested.args.tokens = 1;
  nested.args.hidden = kHidden;
  nested.args.a = a.bytes.data();
  nested.args.a_scale = a.scale.data();
  nested.args.rank = kRank;
  nested.args.b = b.bytes.data();
  nested.args.b_scale = b.scale.data();
  nested.args.cold = kCold;
  nested.active.assign(7, std::vector<std::uint8_t>(kCold, 9));
  const ParallelFor::Body predict = [](void* self, std::int64_t i) {
    auto* n = static_cast<Nested*>(self);
    LowrankArgs args = n->args;
    args.active = n->active[static_cast<std::size_t>(i)].data();
    predict_lowrank(args, n->pool.parallel());
  };
  pool.run(6, predict, &nested);
  predict(&nested, 6);
  for (std::size_t i = 0; i < 6; ++i)
    PI2_CHECK(nested.active[i] == nested.active[6], "call %ld from inside a body says something else",
              static_cast<long>(i));
  return 7;
}

long check_count_signs(const KernelTable& table, std::mt19937& rng) {
  long cases = 0;
  PI2_CHECK(table.count_signs != nullptr, "%s has no count_signs", table.isa);
  for (const std::int64_t words : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 31, 64, 65}) {
    constexpr std::int64_t kCount = 3;
    std::vector<std::uint64_t> rows(static_cast<std::size_t>(kCount * words)), x(static_cast<std::size_t>(words));
    for (auto& w : rows) w = static_cast<std::uint64_t>(rng()) << 32 | rng();
    for (auto& w : x) w = static_cast<std::uint64_t>(rng()) << 32 | rng();
    rows[0] = ~x[0];
    std::int32_t found[kCount + 1] = {-1, -1, -1, 42};
    table.count_signs(rows.data(), kCount, x.data(), words, found);
    for (std::int64_t r = 0; r < kCount; ++r) {
      std::int32_t wanted = 0;
      for (std::int64_t k = 0; k < words * 64; ++k)
        wanted +=
            (rows[static_cast<std::size_t>(r * words + k / 64)] ^ x[static_cast<std::size_t>(k / 64)]) >> (k % 64) & 1;
      PI2_CHECK(found[r] == wanted, "%s words %ld: %d, wanted %d", table.isa, static_cast<long>(words), found[r],
                wanted);
      ++cases;
    }
    PI2_CHECK(found[kCount] == 42, "%s wrote past the end", table.isa);
  }
  return cases;
}

// Signs of `rows` rows of n random weights, and the arguments of a prediction with them.
struct Signbit {
  std::vector<float> w;
  std::vector<std::uint64_t> signs;
  SignbitArgs args;

  Signbit(std::mt19937& rng, std::int64_t rows, std::int64_t n) : w(floats(rng, rows * n)) {
    const std::int64_t words = sign_bytes(n) / 8;
    signs.resize(static_cast<std::size_t>(rows * words));
    for (std::int64_t r = 0; r < rows; ++r) pack_signs(w.data() + r * n, n, signs.data() + r * words);
    args.columns = n;
    args.signs = signs.data();
    args.cold = rows;
  }
};

Predictor any(const LowrankArgs& args) {
  Predictor made;
  made.kind = Predictor::Kind::kLowrank;
  made.lowrank = args;
  return made;
}

Predictor any(const SignbitArgs& args) {
  Predictor made;
  made.kind = Predictor::Kind::kSignbit;
  made.signbit = args;
  return made;
}

// A prompt whose mask would be larger than kMaskBytes goes in slices of whole tiles, with the bits of one go.
long check_slices(std::mt19937& rng, ThreadPool& pool) {
  constexpr std::int64_t kHidden = 8, kTokens = 130, kCold = kMaskBytes / 64;
  FfnArgs ffn;
  ffn.tokens = kTokens;
  ffn.hidden = kHidden;
  ffn.n_hot = 5;
  ffn.neurons = ffn.n_hot + kCold;
  ffn.rows = 2;
  const std::vector<float> x = floats(rng, kTokens * kHidden);
  const std::vector<char> neuron_rows = stored(rng, DType::kF32, ffn.neurons * ffn.rows * kHidden, 0.1f);
  std::vector<float> y(x.size()), wanted(x.size());
  std::vector<std::uint8_t> active(static_cast<std::size_t>(kTokens * kCold));
  ffn.x = x.data();
  ffn.neuron_rows = neuron_rows.data();
  ffn.y = y.data();
  Signbit predictor(rng, kCold, kHidden);
  reset_counters();
  predicted_ffn(any(predictor.args), ffn, pool.parallel());
  const Counters done = read_counters();
  PI2_CHECK(done.calls == 3 && done.tokens == kTokens, "%ld slices of %ld tokens", static_cast<long>(done.calls),
            static_cast<long>(done.tokens));
  predictor.args.x = x.data();
  predictor.args.tokens = kTokens;
  predictor.args.active = active.data();
  predict_signbit(predictor.args, pool.parallel());
  ffn.active = active.data();
  ffn.y = wanted.data();
  sparse_ffn(ffn, pool.parallel());
  PI2_CHECK(std::memcmp(y.data(), wanted.data(), y.size() * sizeof(float)) == 0, "slices have other bits");
  return 1;
}

long check_signbit(std::mt19937& rng, ThreadPool& pool) {
  long cases = 0;
  for (const std::int64_t n : {1, 63, 64, 65, 300}) {
    const std::int64_t rows = 517, tokens = 67;
    Signbit p(rng, rows, n);
    std::vector<float> x = floats(rng, tokens * n);
    x[0] = -0.0f;
    x[static_cast<std::size_t>(2 * n)] = NAN;  // the third token
    std::vector<std::uint8_t> active(static_cast<std::size_t>(tokens * rows), 9);
    p.args.x = x.data();
    p.args.tokens = tokens;
    p.args.margin = 0.9;
    p.args.active = active.data();
    predict_signbit(p.args, pool.parallel());
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t r = 0; r < rows; ++r) {
        std::int64_t agree = 0;
        for (std::int64_t k = 0; k < n; ++k)
          agree += (p.w[static_cast<std::size_t>(r * n + k)] < 0) == (x[static_cast<std::size_t>(t * n + k)] < 0);
        const bool wanted = t == 2 || static_cast<double>(agree) >= 0.9 * static_cast<double>(n - agree);
        PI2_CHECK(active[static_cast<std::size_t>(t * rows + r)] == wanted, "n %ld token %ld row %ld",
                  static_cast<long>(n), static_cast<long>(t), static_cast<long>(r));
        ++cases;
      }
    }
  }
  return cases;
}

template <class Args>
void check_predicted(std::mt19937& rng, ThreadPool& pool, Args predictor, std::int64_t hidden, std::int64_t cold,
                     void (*predict)(const Args&, const ParallelFor&)) {
  for (const std::int64_t tokens : {1, 3}) {
    FfnArgs ffn;
    ffn.tokens = tokens;
    ffn.hidden = hidden;
    ffn.n_hot = 30;
    ffn.neurons = ffn.n_hot + cold;
    const std::vector<float> x = floats(rng, tokens * hidden);
    const std::vector<char> neuron_rows = stored(rng, DType::kF32, ffn.neurons * 3 * hidden, 0.1f);
    std::vector<float> y(x.size()), wanted(x.size());
    std::vector<std::uint8_t> active(static_cast<std::size_t>(tokens * cold));
    ffn.x = x.data();
    ffn.neuron_rows = neuron_rows.data();
    ffn.y = y.data();
    reset_counters();
    predicted_ffn(any(predictor), ffn, pool.parallel());
    const Counters done = read_counters();
    PI2_CHECK(done.gate_rows > tokens * ffn.n_hot && done.gate_rows < tokens * ffn.neurons, "%ld gate rows",
              static_cast<long>(done.gate_rows));
    predictor.x = x.data();
    predictor.tokens = tokens;
    predictor.cold = cold;
    predictor.active = active.data();
    predict(predictor, serial());
    ffn.active = active.data();
    ffn.y = wanted.data();
    sparse_ffn(ffn, serial());
    PI2_CHECK(std::memcmp(y.data(), wanted.data(), y.size() * sizeof(float)) == 0, "%ld tokens: other bits in one call",
              static_cast<long>(tokens));
    ffn.n_hot = ffn.neurons;  // nothing to predict
    ffn.active = nullptr;
    sparse_ffn(ffn, serial());
    ffn.y = y.data();
    predicted_ffn(any(predictor), ffn, serial());
    PI2_CHECK(std::memcmp(y.data(), wanted.data(), y.size() * sizeof(float)) == 0, "all neurons hot: other bits");
  }
}

long check_timings() {
  Timing all[kTimings];
  reset_timings();
  PI2_CHECK(read_timings(all) == 0, "something is left after a reset");
  {
    const Timed timed(Timed::kLinear, 3, 5);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 1000; ++i) add_timing(2, 100 + i % 20, 64, 7);
    });
  }
  for (std::thread& thread : threads) thread.join();
  PI2_CHECK(read_timings(all) == 21, "%ld sizes", static_cast<long>(read_timings(all)));
  for (std::int64_t i = 0; i < 21; ++i) {
    if (all[i].kind == 0) {
      PI2_CHECK(all[i].rows == 3 && all[i].columns == 5 && all[i].calls == 1 && all[i].nanoseconds >= 2000000, "%ld ns",
                static_cast<long>(all[i].nanoseconds));
    } else {
      PI2_CHECK(all[i].kind == 2 && all[i].columns == 64 && all[i].calls == 200 && all[i].nanoseconds == 1400,
                "%ld calls", static_cast<long>(all[i].calls));
    }
  }
  // More sizes than there is room for: none is lost, the rest is together.
  for (int i = 0; i < 2 * kTimings; ++i) add_timing(1, i, 1, 1);
  std::int64_t calls = 0;
  const std::int64_t n = read_timings(all);
  for (std::int64_t i = 0; i < n; ++i) calls += all[i].kind == 1 || all[i].kind == 3 ? all[i].calls : 0;
  PI2_CHECK(calls == 2 * kTimings, "%ld calls", static_cast<long>(calls));
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 10000; ++i) const Timed timed(Timed::kFfn, 100, 64);
  const double each = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / 1e4;
  std::printf("a timer costs %.0f ns\n", each);
  reset_timings();
  return 1;
}

}  // namespace

int main() {
  std::mt19937 rng(7);
  ThreadPool pool(3);
  long cases = check_timings() + check_nested(rng, pool) + check_slices(rng, pool);
  int count = 0;
  const KernelTable* const* tables = available_kernels(&count);
  for (int i = first_of(count); i < count; ++i) {
    PI2_CHECK(select_kernels(tables[i]->isa), "cannot select %s", tables[i]->isa);
    cases += check_nothing_to_project(pool) + check_gate(rng, pool);
    for (const DType dtype : {DType::kI8, DType::kQ4, DType::kQ8}) {
      cases += check_lowrank(rng, pool, dtype, false);
      if (dtype != DType::kI8) cases += check_lowrank(rng, pool, dtype, true);
      const std::int64_t hidden = 96, rank = 40, cold = 900;
      const Rows a(rng, dtype, rank, hidden, 0.01f), b(rng, dtype, cold, rank, 0.01f);
      LowrankArgs args;
      args.hidden = hidden;
      args.dtype = dtype;
      args.a = a.bytes.data();
      args.b = b.bytes.data();
      if (dtype == DType::kI8) {
        args.a_scale = a.scale.data();
        args.b_scale = b.scale.data();
      }
      args.rank = rank;
      check_predicted(rng, pool, args, hidden, cold, &predict_lowrank);
    }
    cases += check_count_signs(*tables[i], rng) + check_signbit(rng, pool);
    Signbit signbit(rng, 900, 96);
    check_predicted(rng, pool, signbit.args, 96, 900, &predict_signbit);
  }
  return finish("test_predict", cases);
}
