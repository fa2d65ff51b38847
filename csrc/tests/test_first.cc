// Layers of which an accelerator has the first neurons: the rest is what a layer of the other neurons would be, bit for
// bit; the others are neither read nor counted, wherever the layer lies.
#include <cmath>
#include <cstring>

#include "pi2/kernels.h"
#include "pi2/offload.h"
#include "pi2/thread_pool.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

namespace {

using namespace pi2;
using namespace pi2_test;

constexpr std::int64_t kHidden = 64, kNeurons = 800;

// A layer of the store with random biases and mask, as arguments of calls for some tokens.
struct Case {
  const StoreFixture& store;
  std::int64_t tokens;
  std::vector<float> x, y, bias_up, bias_down;
  std::vector<std::uint8_t> active;
  FfnArgs args;

  Case(std::mt19937& rng, const StoreFixture& store_, std::int64_t tokens_, std::int64_t n_hot, bool masked)
      : store(store_), tokens(tokens_) {
    const StoreLayer& l = store.layers[0];
    x = floats(rng, tokens * l.hidden);
    y.assign(x.size(), -1.0f);
    bias_up = floats(rng, l.neurons);
    bias_down = floats(rng, l.hidden);
    for (std::int64_t i = 0; i < tokens * (l.neurons - n_hot); ++i) active.push_back(rng() % 4 == 0);
    args.x = x.data();
    args.y = y.data();
    args.tokens = tokens;
    args.hidden = l.hidden;
    args.neurons = l.neurons;
    args.rows = l.rows;
    args.w_dtype = l.w_dtype;
    args.n_hot = n_hot;
    args.active = masked ? active.data() : nullptr;
    args.neuron_rows = store.neuron_rows[0].data();
    if (is_quantized(l.w_dtype)) {
      args.bias_up = bias_up.data();
      args.bias_down = bias_down.data();
    }
  }

  std::vector<float> run(const FfnArgs& made, int threads = 1) {
    std::fill(y.begin(), y.end(), -1.0f);
    ThreadPool pool(threads);
    sparse_ffn(made, pool.parallel());
    return y;
  }

  // Neurons from `first` on as a layer of their own.
  FfnArgs rest(std::int64_t first) const {
    FfnArgs made = args;
    made.neuron_rows = static_cast<const char*>(args.neuron_rows) + first * store.layers[0].neuron_bytes();
    made.neurons -= first;
    made.n_hot = std::max<std::int64_t>(0, args.n_hot - first);
    if (args.bias_up != nullptr) made.bias_up = static_cast<const float*>(args.bias_up) + first;
    return made;
  }

  FfnArgs from(std::int64_t first) const {
    FfnArgs made = args;
    made.first = first;
    return made;
  }
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0, scale = 1e-6;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!(std::fabs(a[i] - b[i]) <= 1e30f)) return NAN;
    most = std::fmax(most, std::fabs(a[i] - b[i]));
    scale = std::fmax(scale, std::fabs(b[i]));
  }
  return most / scale;
}

long check_rest(std::mt19937& rng, std::int64_t rows, DType dtype, bool int8) {
  const StoreFixture store(rng, 1, kNeurons, rows, kHidden, dtype);
  long cases = 0;
  for (const std::int64_t tokens : {1, 3, 130}) {
    for (const bool masked : {false, true}) {
      Case c(rng, store, tokens, 256, masked);
      c.args.int8_activations = int8;
      for (const std::int64_t first : {64, 256}) {
        const std::vector<float> wanted = c.run(c.rest(first));
        reset_counters();
        PI2_CHECK(same(wanted, c.run(c.from(first), 1 + static_cast<int>(tokens % 3))),
                  "%ld tokens, mask %d: the rest from %ld differs", static_cast<long>(tokens), masked,
                  static_cast<long>(first));
        PI2_CHECK(read_counters().neurons == tokens * (kNeurons - first), "%ld neurons counted",
                  static_cast<long>(read_counters().neurons));
        ++cases;
      }
      // Not at a chunk's beginning: another order of sums. And what somebody else computes makes it whole.
      const std::vector<float> whole = c.run(c.args), cold = c.run(c.from(101));
      const double tolerance = int8 && tokens >= 12 ? 1e-4 : 1e-5;
      PI2_CHECK(distance(cold, c.run(c.rest(101))) <= tolerance, "the rest from 101");
      FfnArgs hot = c.args;
      hot.neurons = hot.n_hot = 101;
      hot.active = nullptr;
      hot.bias_down = nullptr;
      std::vector<float> sum = c.run(hot);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += cold[i];
      PI2_CHECK(distance(sum, whole) <= tolerance, "hot and cold: %g", distance(sum, whole));
      cases += 2;
    }
  }
  return cases;
}

// Neurons that never fire may be left out: the same bits as with them, at any boundary.
long check_silent(std::mt19937& rng) {
  StoreFixture store(rng, 1, kNeurons, 3, kHidden, DType::kF32);
  constexpr std::int64_t kSilent = 37;  // in the first chunk of both ways to cut
  const std::size_t neuron = static_cast<std::size_t>(store.layers[0].neuron_bytes());
  std::memset(store.neuron_rows[0].data(), 0, kSilent * neuron);
  for (const std::int64_t tokens : {1, 40}) {
    Case c(rng, store, tokens, 0, false);
    PI2_CHECK(same(c.run(c.args), c.run(c.from(kSilent))), "%ld tokens", static_cast<long>(tokens));
  }
  return 2;
}

long check_nothing_left(std::mt19937& rng) {
  const StoreFixture store(rng, 1, 100, 3, kHidden, DType::kQ4);
  std::string problem;
  const std::unique_ptr<Offload> offload = Offload::open(store.path, OffloadOptions(), &problem);
  PI2_CHECK(offload != nullptr, "%s", problem.c_str());
  for (const std::int64_t tokens : {1, 40}) {
    for (const bool int8 : {false, true}) {
      Case c(rng, store, tokens, 100, false);
      FfnArgs args = c.from(100);
      args.int8_activations = int8;
      for (int over = 0; over < 2; ++over) {
        if (over == 0)
          c.run(args);
        else
          PI2_CHECK(offload->ffn(0, Predictor(), args, serial()).empty(), "reading nothing");
        for (std::size_t i = 0; i < c.y.size(); ++i)
          PI2_CHECK(c.y[i] == c.bias_down[i % kHidden], "%ld tokens: not the bias", static_cast<long>(tokens));
      }
    }
  }
  return 8;
}

// Over a store the others are not read: it is damaged there, which only the whole layer notices.
long check_store(std::mt19937& rng, DType dtype, std::int64_t cluster) {
  StoreFixture store(rng, 2, kNeurons, 3, kHidden, dtype, 0, cluster);
  constexpr std::int64_t kFirst = 300;
  for (const StoreLayer& l : store.layers)
    for (std::int64_t slot = 0; slot < kFirst / cluster; ++slot)
      store.file[static_cast<std::size_t>(l.slots + slot * l.slot_bytes)] ^= 1;
  store.write();
  long cases = 0;
  for (const std::int64_t share : {0, 3, 1}) {  // of the neurons, that there is room for
    for (const bool int8 : {false, true}) {
      if (int8 && !is_quantized(dtype)) continue;
      OffloadOptions options;
      options.cache_bytes = share == 0 ? 0 : 2 * kNeurons * (store.layers[0].neuron_bytes() + 512) / share;
      std::string problem;
      const std::unique_ptr<Offload> offload = Offload::open(store.path, options, &problem);
      PI2_CHECK(offload != nullptr, "%s", problem.c_str());
      if (offload == nullptr) return cases;
      PI2_CHECK(share == 0 || !offload->preload().empty(), "damage was not preloaded");
      offload->leave_out({kFirst, kFirst});
      PI2_CHECK(offload->preload().empty(), "what is left out was preloaded");
      (void)offload->stats(true);
      std::int64_t wanted = 0;
      for (const std::int64_t tokens : {1, 5, 40, 515}) {
        for (const bool masked : {false, true}) {
          if (tokens == 515 && share != 3) continue;  // in memory that takes long
          Case c(rng, store, tokens, kFirst, masked);
          c.args.int8_activations = int8;
          const std::vector<float> in_memory = c.run(c.from(kFirst));
          std::fill(c.y.begin(), c.y.end(), -1.0f);
          for (const std::int64_t layer : {0, 1}) {
            c.args.neuron_rows = store.neuron_rows[static_cast<std::size_t>(layer)].data();
            const std::vector<float> expected = layer == 0 ? in_memory : c.run(c.from(kFirst));
            ThreadPool pool(2);
            const std::string wrong = offload->ffn(layer, Predictor(), c.from(kFirst), pool.parallel());
            PI2_CHECK(wrong.empty() && same(expected, c.y), "%ld tokens, mask %d: %s", static_cast<long>(tokens),
                      masked, wrong.c_str());
            if (!masked) wanted += (kNeurons - kFirst) * ((tokens + kPromptTokens - 1) / kPromptTokens);
            ++cases;
          }
        }
      }
      const OffloadStats stats = offload->stats(true);
      PI2_CHECK(stats.wanted >= wanted && stats.wanted <= 2 * wanted, "%ld neurons wanted",
                static_cast<long>(stats.wanted));
      // A cache for all of them has them all from the beginning.
      PI2_CHECK(share != 1 || (stats.reads == 0 && stats.hits == stats.wanted), "%ld reads",
                static_cast<long>(stats.reads));
      Case c(rng, store, 1, kFirst, false);
      PI2_CHECK(offload->ffn(0, Predictor(), c.args, serial()).find("checksum") != std::string::npos, "no damage");
      ++cases;
    }
  }
  return cases;
}

// Nor is what is left out read ahead of a call that is likely to want all of a layer.
long check_read_ahead(std::mt19937& rng, std::int64_t cluster) {
  const StoreFixture store(rng, 2, kNeurons, 3, kHidden, DType::kQ4, 0, cluster);
  constexpr std::int64_t kFirst = 300;
  OffloadOptions options;
  options.cache_bytes = 2 * kNeurons * (store.layers[0].neuron_bytes() + 512);
  std::string problem;
  const std::unique_ptr<Offload> offload = Offload::open(store.path, options, &problem);
  PI2_CHECK(offload != nullptr, "%s", problem.c_str());
  if (offload == nullptr) return 0;
  offload->leave_out({0, kFirst});
  for (const std::int64_t layer : {0, 1}) {
    offload->prefetch(layer, kNeurons, nullptr, 1);
    const std::int64_t guessed = offload->stats(true).guessed, wanted = kNeurons - (layer == 0 ? 0 : kFirst);
    PI2_CHECK(guessed == wanted / cluster, "%ld of %ld slots", static_cast<long>(guessed),
              static_cast<long>(wanted / cluster));
  }
  return 2;
}

// With a predictor, whose mask is for the neurons from n_hot on wherever the layer begins.
long check_predicted(std::mt19937& rng) {
  const StoreFixture store(rng, 1, kNeurons, 3, kHidden, DType::kQ4);
  Case c(rng, store, 3, 256, false);
  const std::vector<char> signs = stored(rng, DType::kI8, (kNeurons - 256) * sign_bytes(kHidden));
  Predictor predictor;
  predictor.kind = Predictor::Kind::kSignbit;
  predictor.signbit.columns = kHidden;
  predictor.signbit.signs = signs.data();
  predictor.signbit.cold = kNeurons - 256;
  predictor.signbit.margin = 1;
  predicted_ffn(predictor, c.rest(128), serial());
  const std::vector<float> wanted = c.y;
  std::fill(c.y.begin(), c.y.end(), -1.0f);
  predicted_ffn(predictor, c.from(128), serial());
  PI2_CHECK(same(wanted, c.y), "with a predictor");
  // An accelerator that has neurons beyond the hot ones: their part of the mask is passed over.
  Predictor fewer = predictor;
  fewer.signbit.signs = signs.data() + 64 * sign_bytes(kHidden);
  fewer.signbit.cold = kNeurons - 320;
  predicted_ffn(fewer, c.rest(320), serial());
  const std::vector<float> beyond = c.y;
  std::fill(c.y.begin(), c.y.end(), -1.0f);
  predicted_ffn(predictor, c.from(320), serial());
  PI2_CHECK(same(beyond, c.y), "with a predictor, beyond the hot ones");
  return 2;
}

}  // namespace

int main() {
  std::mt19937 rng(5);
  int tables = 0;
  const KernelTable* const* all = available_kernels(&tables);
  long cases = 0;
  for (int i = first_of(tables); i < tables; ++i) {
    select_kernels(all[i]->isa);
    cases += check_rest(rng, 3, DType::kF32, false);
    cases += check_rest(rng, 2, DType::kBF16, false);
    for (const bool int8 : {false, true}) cases += check_rest(rng, 3, DType::kQ4, int8);
    cases += check_rest(rng, 2, DType::kQ8, true);
    cases += check_silent(rng) + check_nothing_left(rng) + check_predicted(rng);
  }
  cases += check_store(rng, DType::kQ4, 1) + check_store(rng, DType::kF32, 1) + check_store(rng, DType::kQ4, 4);
  cases += check_read_ahead(rng, 1) + check_read_ahead(rng, 4);
  return finish("first", cases);
}
