// Mixtures of experts against one token and one slot at a time, bit for bit: in memory and over a store, whatever the
// threads and the company; what is announced; slices; indices that name nobody.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <utility>

#include "base/convert.h"
#include "pi2/experts.h"
#include "pi2/offload.h"
#include "pi2/thread_pool.h"
#include "tests/store_fixture.h"

namespace {

using namespace pi2;
using namespace pi2_test;
using Kind = Predictor::Kind;

constexpr std::int64_t kRank = 21;

// Experts of one size with predictors of one kind.
struct Experts {
  std::vector<char> neuron_rows, a, b, signs;
  std::vector<float> a_scale, b_scale, b_bias;
  std::vector<double> cuts, thresholds;
  ExpertStack stack;
  std::int64_t count;

  Experts(std::mt19937& rng, std::int64_t n, std::int64_t neurons, std::int64_t rows, std::int64_t hidden, DType dtype,
          Kind kind, DType predictor_dtype, bool int8_activations)
      : count(n) {
    for (std::int64_t r = 0; r < n * neurons * rows; ++r) append(&neuron_rows, rng, dtype, hidden);
    describe(neuron_rows.data(), neurons, rows, hidden, dtype, int8_activations);
    predict_with(rng, kind, predictor_dtype);
  }

  Experts(const Experts&) = delete;

  static void append(std::vector<char>* out, std::mt19937& rng, DType dtype, std::int64_t columns) {
    const std::vector<char> row =
        is_quantized(dtype) ? quantized_row(rng, dtype, columns) : stored(rng, dtype, columns);
    out->insert(out->end(), row.begin(), row.end());
  }

  void describe(const char* data, std::int64_t neurons, std::int64_t rows, std::int64_t hidden, DType dtype, bool a8) {
    FfnArgs& layer = stack.layer;
    layer.neuron_rows = data;
    layer.neurons = neurons;
    layer.rows = rows;
    layer.hidden = hidden;
    layer.w_dtype = dtype;
    layer.int8_activations = a8;
  }

  void predict_with(std::mt19937& rng, Kind kind, DType dtype) {
    const std::int64_t neurons = stack.layer.neurons, hidden = stack.layer.hidden;
    stack.predictor.kind = kind;
    for (std::int64_t e = 0; e < count; ++e) cuts.push_back(kind == Kind::kSignbit ? 0.9 + 0.1 * e : 0.1 * e);
    for (std::int64_t r = 0; r < count * kRank; ++r) append(&a, rng, dtype, hidden);
    for (std::int64_t r = 0; r < count * neurons; ++r) append(&b, rng, dtype, kRank);
    for (std::int64_t i = 0; i < count * neurons * sign_bytes(hidden); ++i) signs.push_back(static_cast<char>(rng()));
    a_scale = floats(rng, count * kRank);
    b_scale = floats(rng, count * neurons);
    b_bias = floats(rng, count * neurons);
    LowrankArgs& l = stack.predictor.lowrank;
    l.hidden = hidden;
    l.dtype = dtype;
    l.a = a.data();
    l.b = b.data();
    if (dtype == DType::kI8) {
      l.a_scale = a_scale.data();
      l.b_scale = b_scale.data();
    }
    l.b_bias = b_bias.data();
    l.rank = kRank;
    l.cold = neurons;
    SignbitArgs& s = stack.predictor.signbit;
    s.columns = hidden;
    s.signs = signs.data();
    s.cold = neurons;
    stack.cuts = cuts.data();
    for (std::int64_t e = 0; e < count; ++e) thresholds.push_back(0.2 * e);
    if (kind != Kind::kLowrank) stack.thresholds = thresholds.data();  // else that of the layer, for all
  }

  // What expert e makes of one token, without the code under test: its own copies of the tensors, cut out.
  std::vector<float> of_one(std::int64_t e, const float* x) const {
    const FfnArgs& all = stack.layer;
    std::vector<float> y(static_cast<std::size_t>(all.hidden));
    FfnArgs layer = all;
    layer.x = x;
    layer.y = y.data();
    layer.tokens = 1;
    if (stack.thresholds != nullptr) layer.threshold = static_cast<float>(thresholds[static_cast<std::size_t>(e)]);
    // Of neurons from `first` on as an expert of its own.
    const std::int64_t first = all.first, neuron = e * all.neurons + first;
    layer.neuron_rows =
        static_cast<const char*>(all.neuron_rows) + neuron * all.rows * row_bytes(all.w_dtype, all.hidden);
    layer.neurons -= first;
    layer.first = layer.n_hot = 0;
    Predictor p = stack.predictor;
    const auto part = [&](const std::vector<char>& data) {
      return data.data() + static_cast<std::size_t>(e) * (data.size() / static_cast<std::size_t>(count));
    };
    p.lowrank.a = part(a);
    p.lowrank.b = part(b) + first * row_bytes(p.lowrank.dtype, kRank);
    if (p.lowrank.a_scale != nullptr) {
      p.lowrank.a_scale = &a_scale[static_cast<std::size_t>(e * kRank)];
      p.lowrank.b_scale = &b_scale[static_cast<std::size_t>(neuron)];
    }
    p.lowrank.b_bias = &b_bias[static_cast<std::size_t>(neuron)];
    p.lowrank.threshold = static_cast<float>(cuts[static_cast<std::size_t>(e)]);
    p.signbit.signs = part(signs) + first * sign_bytes(all.hidden);
    p.signbit.margin = cuts[static_cast<std::size_t>(e)];
    predicted_ffn(p, layer, serial());
    return y;
  }
};

// Tokens, and where they are routed.
struct Tokens {
  std::int64_t count, hidden, slots;
  DType dtype, routing_dtype;
  std::vector<char> x, routing, y;
  std::vector<std::int64_t> index;
  ExpertsArgs args;

  Tokens(std::mt19937& rng, std::int64_t tokens, std::int64_t width, std::int64_t k, std::int64_t experts,
         DType x_dtype, DType weights)
      : count(tokens), hidden(width), slots(k), dtype(x_dtype), routing_dtype(weights) {
    x = stored(rng, dtype, count * hidden);
    routing = stored(rng, routing_dtype, count * slots);
    y.assign(x.size(), 77);
    // One in experts + 1 goes nowhere, and some tokens name an expert twice.
    for (std::int64_t i = 0; i < count * slots; ++i)
      index.push_back(static_cast<std::int64_t>(rng() % static_cast<unsigned>(experts + 1)));
    args = {x.data(), y.data(), dtype, count, hidden, index.data(), routing.data(), routing_dtype, slots, experts};
  }

  Tokens(const Tokens&) = delete;

  std::vector<char> wanted(const Experts& experts) const {
    std::vector<char> out(x.size());
    std::vector<float> x_H(static_cast<std::size_t>(hidden));
    for (std::int64_t t = 0; t < count; ++t) {
      widen(x.data() + t * row_bytes(dtype, hidden), dtype, x_H.data(), hidden);
      std::vector<float> sum(static_cast<std::size_t>(hidden));
      for (std::int64_t j = 0; j < slots; ++j) {
        const std::int64_t e = index[static_cast<std::size_t>(t * slots + j)];
        if (e == experts.count) continue;
        const std::vector<float> y_H = experts.of_one(e, x_H.data());
        const float weight = load_float(routing.data(), routing_dtype, t * slots + j);
        for (std::size_t k = 0; k < sum.size(); ++k) {
          const volatile float product = weight * y_H[k];  // two roundings, as the core is compiled
          sum[k] += product;
        }
      }
      narrow(sum.data(), out.data() + t * row_bytes(dtype, hidden), dtype, hidden);
    }
    return out;
  }
};

long check_bits(std::mt19937& rng, std::int64_t experts, std::int64_t neurons, std::int64_t rows, std::int64_t hidden,
                std::int64_t tokens, std::int64_t slots, DType w_dtype, bool a8) {
  static const struct {
    Kind kind;
    DType dtype;
  } predictors[] = {{Kind::kNone, DType::kI8},
                    {Kind::kLowrank, DType::kI8},
                    {Kind::kLowrank, DType::kQ4},
                    {Kind::kSignbit, DType::kQ8}};
  static const DType floats_of[] = {DType::kF32, DType::kBF16, DType::kF16};
  long cases = 0;
  for (const auto& p : predictors) {
    Experts made(rng, experts, neurons, rows, hidden, w_dtype, p.kind, p.dtype, a8);
    Tokens in(rng, tokens, hidden, slots, experts, floats_of[cases % 3], floats_of[(cases + experts) % 3]);
    for (const int threads : {1, 3}) {
      // With some of each expert's neurons left out, if it has so many.
      made.stack.layer.first = made.stack.layer.n_hot = threads > 1 && neurons > 64 ? 64 : 0;
      const std::vector<char> wanted = in.wanted(made);
      ThreadPool pool(threads);
      std::fill(in.y.begin(), in.y.end(), static_cast<char>(77));
      const std::string wrong = experts_ffn(in.args, made.stack, pool.parallel());
      PI2_CHECK(wrong.empty(), "%s", wrong.c_str());
      PI2_CHECK(in.y == wanted, "%ld experts, %ld tokens, %ld slots, predictor %d, %d threads",
                static_cast<long>(experts), static_cast<long>(tokens), static_cast<long>(slots),
                static_cast<int>(p.kind), threads);
    }
    ++cases;
  }
  return cases;
}

// A token that names one expert in all its slots is one token of that expert: not 24 of them, which go by tiles.
long check_repeats(std::mt19937& rng) {
  const Experts made(rng, 2, 100, 3, 64, DType::kQ4, Kind::kNone, DType::kQ4, true);
  Tokens in(rng, 8, 64, 3, 2, DType::kF32, DType::kF32);
  std::fill(in.index.begin(), in.index.end(), 1);
  PI2_CHECK(experts_ffn(in.args, made.stack, serial()).empty() && in.y == in.wanted(made), "repeated experts");
  return 1;
}

// Writes what it is told, and computes (expert + 1) x.
struct Recorder : ExpertLayers {
  std::vector<ExpertWork> announced;
  std::vector<std::vector<std::int64_t>> ids;
  std::int64_t slices = 0, computed = 0, fails_at = -1;

  void announce(const ExpertWork* works, std::int64_t n, const ParallelFor&) override {
    ++slices;
    computed = 0;
    announced.assign(works, works + n);
    ids.clear();
    for (const ExpertWork& work : announced) ids.emplace_back(work.ids, work.ids + work.tokens);
  }

  std::string compute(const ExpertWork& work, const ParallelFor&) override {
    PI2_CHECK(announced[static_cast<std::size_t>(computed++)].y == work.y, "in the announced order");
    if (work.expert == fails_at) return "expert " + std::to_string(work.expert) + " is away";
    const FfnArgs layer = of_expert(FfnArgs(), work);
    const auto* x = static_cast<const float*>(layer.x);
    PI2_CHECK(layer.tokens == work.tokens && layer.x_dtype == DType::kF32 && layer.y == work.y, "of_expert");
    for (std::int64_t i = 0; i < work.tokens * work.hidden; ++i) work.y[i] = static_cast<float>(work.expert + 1) * x[i];
    return "";
  }
};

long check_announcement(std::mt19937& rng) {
  Tokens in(rng, 4, 5, 2, 6, DType::kBF16, DType::kF32);
  in.index = {4, 2, 6, 4, 6, 6, 2, 2};
  in.args.index = in.index.data();
  Recorder layers;
  PI2_CHECK(mix_experts(in.args, layers, serial()).empty(), "a mixture");
  PI2_CHECK(layers.slices == 1 && layers.ids == (std::vector<std::vector<std::int64_t>>{{0, 3}, {0, 1}}), "token ids");
  PI2_CHECK(layers.announced[0].expert == 2 && layers.announced[1].expert == 4 && layers.computed == 2, "experts");
  for (int k = 0; k < 5; ++k) {
    PI2_CHECK(load_float(in.y.data(), in.dtype, 10 + k) == 0, "a token that goes nowhere");
    float wanted = 0, r[2];
    for (int j = 0; j < 2; ++j) r[j] = load_float(in.routing.data(), DType::kF32, j);
    const volatile float first = r[0] * (5 * load_float(in.x.data(), in.dtype, k));
    const volatile float second = r[1] * (3 * load_float(in.x.data(), in.dtype, k));
    wanted = first + second;
    char narrowed[2];
    narrow(&wanted, narrowed, in.dtype, 1);
    PI2_CHECK(std::memcmp(narrowed, &in.y[static_cast<std::size_t>(2 * k)], 2) == 0, "slots in order");
  }
  layers.fails_at = 4;
  PI2_CHECK(mix_experts(in.args, layers, serial()) == "expert 4 is away" && layers.slices == 2, "a failure");
  in.index[5] = 7;
  const std::string wrong = mix_experts(in.args, layers, serial());
  PI2_CHECK(wrong ==
                "index: expected 0 to 5, or 6 for no expert, found 7 for token 2, slot 1. The router is of another "
                "model.",
            "%s", wrong.c_str());
  in.index[5] = -1;
  PI2_CHECK(mix_experts(in.args, layers, serial()).find("found -1 for token 2, slot 1") != std::string::npos &&
                layers.slices == 2,
            "before anything is computed");
  in.args.tokens = 0;
  PI2_CHECK(mix_experts(in.args, layers, serial()).empty() && layers.slices == 2, "no tokens");
  return 6;
}

// A prompt in slices: as many as kExpertBytes says, each token where it belongs.
long check_slices(std::mt19937& rng) {
  const std::int64_t hidden = 16384, slots = 2, slice = expert_slice(slots, hidden), tokens = slice + 3;
  PI2_CHECK(slice == 256 && expert_slice(8, 1 << 20) == 64, "%ld tokens", static_cast<long>(slice));
  Tokens in(rng, tokens, hidden, slots, 3, DType::kF32, DType::kF32);
  Recorder layers;
  ThreadPool pool(3);
  PI2_CHECK(mix_experts(in.args, layers, pool.parallel()).empty() && layers.slices == 2, "two slices");
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (const std::int64_t k : {std::int64_t{0}, hidden - 1}) {
      float sum = 0;
      for (std::int64_t j = 0; j < slots; ++j) {
        const std::int64_t e = in.index[static_cast<std::size_t>(t * slots + j)];
        const float part = static_cast<float>(e + 1) * load_float(in.x.data(), in.dtype, t * hidden + k);
        const volatile float product = load_float(in.routing.data(), in.routing_dtype, t * slots + j) * part;
        if (e < 3) sum += product;
      }
      PI2_CHECK(sum == load_float(in.y.data(), in.dtype, t * hidden + k), "token %ld", static_cast<long>(t));
    }
  }
  return tokens;
}

// Layers 1 to 4 of a store are experts: the bits of the same in memory, for every budget; errors of reading as they
// are.
long check_store(std::mt19937& rng, Kind kind, DType w_dtype, bool a8, bool apart = false) {
  const std::int64_t experts = 4, neurons = 90, hidden = 64;
  const StoreFixture store(rng, experts + 1, neurons, 3, hidden, w_dtype, 0, 1, nullptr, apart);
  Experts made(rng, experts, neurons, 3, hidden, w_dtype, kind, DType::kQ4, a8);
  made.neuron_rows.clear();
  for (std::int64_t e = 1; e <= experts; ++e) {
    const std::vector<char>& part = store.neuron_rows[static_cast<std::size_t>(e)];
    made.neuron_rows.insert(made.neuron_rows.end(), part.begin(), part.end());
  }
  made.stack.layer.neuron_rows = made.neuron_rows.data();
  ExpertStack stored = made.stack;
  stored.layer.neuron_rows = nullptr;
  long cases = 0;
  for (const char* engine : {"pread", "mmap"}) {
    for (const std::int64_t slots : {0, 7, 150, 1000}) {
      OffloadOptions options;
      options.engine = engine;
      options.cache_bytes = slots * ((store.layers[0].neuron_bytes() + 63) / 64 * 64);
      options.io_threads = 3;
      std::string problem;
      const std::unique_ptr<Offload> offload = Offload::open(store.path, options, &problem);
      PI2_CHECK(offload != nullptr, "%s", problem.c_str());
      if (offload == nullptr) return 0;
      for (const std::int64_t tokens : {1, 6, 1}) {
        Tokens in(rng, tokens, hidden, 2, experts, DType::kBF16, DType::kBF16);
        ThreadPool pool(2);
        PI2_CHECK(experts_ffn(in.args, made.stack, serial()).empty(), "in memory");
        const std::vector<char> wanted = in.y;
        std::fill(in.y.begin(), in.y.end(), static_cast<char>(77));
        const std::string wrong = stored_experts(in.args, stored, *offload, 1, pool.parallel());
        PI2_CHECK(wrong.empty() && in.y == wanted, "%s, %ld neurons: %s", engine, static_cast<long>(slots),
                  wrong.c_str());
        ++cases;
      }
      if (std::strcmp(engine, "mmap") == 0) continue;
      if (slots > 0) continue;
      Tokens in(rng, 1, hidden, 1, experts, DType::kF32, DType::kF32);
      in.index[0] = 2;
      PI2_CHECK(truncate(store.path.c_str(), store.layers[3].slots) == 0, "truncate");
      const std::string wrong = stored_experts(in.args, stored, *offload, 1, serial());
      PI2_CHECK(wrong.find("reading the neuron store: layer 3, neuron ") == 0, "found '%s'", wrong.c_str());
      const_cast<StoreFixture&>(store).write();
      PI2_CHECK(stored_experts(in.args, stored, *offload, 1, serial()).empty(), "after it is whole again");
    }
  }
  return cases;
}

// The experts with the highest scores, as the sums say: in plain order, of equal ones the first.
long check_route(std::mt19937& rng) {
  const std::int64_t experts = 7, hidden = 37, tokens = 3;
  long cases = 0;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const std::vector<char> weights = stored(rng, dtype, experts * hidden);
    const std::vector<float> x = floats(rng, tokens * hidden), bias = floats(rng, experts);
    const std::vector<float> correction = floats(rng, experts);
    for (int how = 0; how < 4; ++how) {
      Router router{
          weights.data(), dtype, how & 1 ? bias.data() : nullptr, how & 2 ? correction.data() : nullptr, experts,
          hidden,         3};
      std::int64_t chosen[tokens * 3];
      route(router, x.data(), tokens, chosen);
      for (std::int64_t t = 0; t < tokens; ++t) {
        std::vector<std::pair<double, std::int64_t>> scores;
        for (std::int64_t e = 0; e < experts; ++e) {
          double score = how & 1 ? static_cast<double>(bias[static_cast<std::size_t>(e)]) : 0.0;
          for (std::int64_t k = 0; k < hidden; ++k)
            score += static_cast<double>(load_float(weights.data(), dtype, e * hidden + k)) *
                     static_cast<double>(x[static_cast<std::size_t>(t * hidden + k)]);
          if (how & 2)
            score = 1 / (1 + std::exp(-score)) + static_cast<double>(correction[static_cast<std::size_t>(e)]);
          scores.emplace_back(-score, e);
        }
        std::sort(scores.begin(), scores.end());
        for (std::int64_t j = 0; j < 3; ++j)
          PI2_CHECK(chosen[t * 3 + j] == scores[static_cast<std::size_t>(j)].second, "token %ld, choice %ld, how %d",
                    static_cast<long>(t), static_cast<long>(j), how);
        ++cases;
      }
    }
  }
  const std::vector<float> same(static_cast<std::size_t>(experts * hidden), 0.5f), x = floats(rng, hidden);
  std::int64_t chosen[3];
  route({same.data(), DType::kF32, nullptr, nullptr, experts, hidden, 3}, x.data(), 1, chosen);
  PI2_CHECK(chosen[0] == 0 && chosen[1] == 1 && chosen[2] == 2, "equal scores");
  return cases + 1;
}

// Guesses that are mostly wrong stop being read, and are again when they have been right for a while.
long check_record() {
  GuessRecord record;
  const std::int64_t wanted[] = {1, 2, 4};
  const auto calls = [&](const std::vector<std::int64_t>& guess, int n) {
    for (int i = 0; i < n; ++i) {
      if (!guess.empty()) record.guess(guess);
      record.see(wanted, 3, 4);  // 4 is none
    }
    return record.pays();
  };
  PI2_CHECK(record.pays() && calls({}, 99), "nothing guessed");
  PI2_CHECK(calls({1, 3}, 99), "half of them");
  PI2_CHECK(calls({0, 3}, 1) == false && calls({0, 3}, 99) == false, "none of them");
  PI2_CHECK(calls({1, 2}, 5) == false && calls({1, 2}, 20), "all of them");
  return 4;
}

// Layers 0 to 3 of a store are a mixture, 4 to 7 the next one: what its router and predictors say of the first one's
// input is read while that is computed, and then nothing of it is missing. Prompts guess nothing. The same bits.
long check_early(std::mt19937& rng, Kind kind) {
  const std::int64_t experts = 4, neurons = 90, hidden = 64;
  const StoreFixture store(rng, 2 * experts, neurons, 3, hidden, DType::kF32);
  Experts first(rng, experts, neurons, 3, hidden, DType::kF32, kind, DType::kQ4, false);
  Experts second(rng, experts, neurons, 3, hidden, DType::kF32, kind, DType::kQ4, false);
  first.stack.layer.neuron_rows = second.stack.layer.neuron_rows = nullptr;
  NextExperts next;
  const std::vector<float> weights = floats(rng, experts * hidden);
  next.router = {weights.data(), DType::kF32, nullptr, nullptr, experts, hidden, 2};
  next.stack = second.stack;
  next.first_layer = experts;
  long cases = 0;
  for (const std::int64_t tokens : {std::int64_t{1}, kMostLookahead, kMostLookahead + 1}) {
    std::vector<char> y[2];
    for (const bool early : {false, true}) {
      OffloadOptions options;
      options.cache_bytes = 1 << 22;
      std::string problem;
      const std::unique_ptr<Offload> offload = Offload::open(store.path, options, &problem);
      PI2_CHECK(offload != nullptr, "%s", problem.c_str());
      if (offload == nullptr) return 0;
      std::mt19937 same(static_cast<unsigned>(tokens));
      Tokens in(same, tokens, hidden, 2, experts, DType::kF32, DType::kF32);
      ThreadPool pool(2);
      const std::string wrong =
          stored_experts(in.args, first.stack, *offload, 0, pool.parallel(), nullptr, early ? &next : nullptr);
      PI2_CHECK(wrong.empty(), "%s", wrong.c_str());
      y[early] = in.y;
      route(next.router, reinterpret_cast<const float*>(in.x.data()), tokens, in.index.data());
      CallStats found;
      const std::string also = stored_experts(in.args, second.stack, *offload, experts, pool.parallel(), &found);
      PI2_CHECK(also.empty() && found.wanted > 0, "%s", also.c_str());
      PI2_CHECK((found.reads == 0) == (early && tokens <= kMostLookahead), "%ld tokens, early %d: %ld reads",
                static_cast<long>(tokens), early, static_cast<long>(found.reads));
      y[early].insert(y[early].end(), in.y.begin(), in.y.end());
      ++cases;
    }
    PI2_CHECK(y[0] == y[1], "the same bits, %ld tokens", static_cast<long>(tokens));
  }
  return cases;
}

// Pairs of `in`, without those of experts that have less than `share` of the weight of each of their tokens and of none
// the most.
std::vector<std::int64_t> without_light(const Tokens& in, const std::vector<float>& weights, std::int64_t experts,
                                        float share) {
  std::vector<std::int64_t> rest = in.index;
  for (std::int64_t e = 0; e < experts; ++e) {
    bool light = true;
    for (std::int64_t t = 0; t < in.count; ++t) {
      const auto index = in.index.begin() + t * in.slots;
      const auto weight = weights.begin() + t * in.slots;
      if (std::find(index, index + in.slots, e) == index + in.slots) continue;
      float all = 0, own = 0;
      for (std::int64_t j = 0; j < in.slots; ++j) {
        all += weight[j];
        own += index[j] == e ? weight[j] : 0;
      }
      light = light && own < share * all && index[std::max_element(weight, weight + in.slots) - weight] != e;
    }
    if (light) std::replace(rest.begin(), rest.end(), e, experts);
  }
  return rest;
}

// How many experts the tokens have in all.
std::int64_t choices_of(const std::vector<std::int64_t>& index, std::int64_t slots, std::int64_t experts) {
  std::set<std::pair<std::size_t, std::int64_t>> found;
  for (std::size_t i = 0; i < index.size(); ++i)
    if (index[i] < experts) found.insert({i / static_cast<std::size_t>(slots), index[i]});
  return static_cast<std::int64_t>(found.size());
}

// Experts of little weight add nothing where they are not in memory; prompts, and what is in memory, are as always.
long check_drop(std::mt19937& rng, Kind kind) {
  const std::int64_t experts = 6, slots = 3;
  const StoreFixture store(rng, experts, 90, 3, 64, DType::kF32);
  Experts made(rng, experts, 90, 3, 64, DType::kF32, kind, DType::kQ4, false);
  made.stack.layer.neuron_rows = nullptr;
  long cases = 0, dropped = 0;
  for (const bool there : {false, true}) {
    for (const double share : {0.0, 0.2, 0.4, 1.0}) {
      std::unique_ptr<Offload> open[2];
      for (const bool drops : {false, true}) {
        OffloadOptions options;
        options.policy = there ? "lfu" : "none";
        options.cache_bytes = 1 << 22;
        options.drop_experts = drops ? share : 0;
        std::string problem;
        open[drops] = Offload::open(store.path, options, &problem);
        PI2_CHECK(open[drops] != nullptr, "%s", problem.c_str());
        if (open[drops] == nullptr) return 0;
        if (there) PI2_CHECK(open[drops]->preload().empty(), "preload");
      }
      PI2_CHECK(open[1]->drop_experts() == share, "%f", share);
      for (const std::int64_t tokens : {1, 2, 21, 30, 40}) {
        Tokens in(rng, tokens, 64, slots, experts, DType::kF32, DType::kF32);
        std::vector<float> weights;
        for (std::int64_t i = 0; i < tokens * slots; ++i) weights.push_back(static_cast<float>(rng() % 8) / 8);
        in.args.routing = weights.data();
        in.index[0] = in.index[1];  // twice
        const std::vector<std::int64_t> rest = without_light(in, weights, experts, static_cast<float>(share));
        const bool may = !there && tokens < kStreamFrom && choices_of(in.index, slots, experts) <= 64;
        const std::int64_t fewer = choices_of(in.index, slots, experts) - choices_of(rest, slots, experts);
        ThreadPool pool(2);
        std::string wrong = stored_experts(in.args, made.stack, *open[1], 0, pool.parallel());
        const std::vector<char> found = in.y;
        if (may) in.index = rest;
        in.args.index = in.index.data();
        wrong += stored_experts(in.args, made.stack, *open[0], 0, pool.parallel());
        PI2_CHECK(wrong.empty() && in.y == found, "%d, %f, %ld tokens: %s", there, share, static_cast<long>(tokens),
                  wrong.c_str());
        const std::int64_t counted = open[1]->stats(true).experts_left_out;
        PI2_CHECK(counted == (may ? fewer : 0), "%f, %ld tokens: %ld of %ld", share, static_cast<long>(tokens),
                  static_cast<long>(counted), static_cast<long>(fewer));
        dropped += counted;
        ++cases;
      }
    }
  }
  PI2_CHECK(dropped > 0, "nothing was left out");
  return cases;
}

// Of what is wanted, half.
long check_mostly_missing(std::mt19937& rng) {
  const StoreFixture store(rng, 1, 90, 3, 64, DType::kF32);
  OffloadOptions options;
  options.policy = "static";
  options.cache_bytes = 45 * store.layers[0].slot_bytes;
  std::string problem;
  const std::unique_ptr<Offload> offload = Offload::open(store.path, options, &problem);
  PI2_CHECK(offload != nullptr && offload->preload().empty(), "%s", problem.c_str());
  if (offload == nullptr) return 0;
  const std::int64_t there = offload->stats(false).resident, all = store.layers[0].n_slots();
  PI2_CHECK(there * store.layers[0].cluster > 20 && there < all, "%ld", static_cast<long>(there));
  PI2_CHECK(offload->mostly_missing(0, 0, nullptr, 1) == (2 * there < all), "all of it");
  std::vector<std::uint8_t> active(2 * 90, 0);
  PI2_CHECK(!offload->mostly_missing(0, 0, active.data(), 1), "nothing is wanted");
  const std::int64_t last = (all - 1) * store.layers[0].cluster;
  active[0] = 1;
  PI2_CHECK(!offload->mostly_missing(0, 0, active.data(), 1), "what is there");
  active[90 + static_cast<std::size_t>(last)] = 1;
  PI2_CHECK(!offload->mostly_missing(0, 0, active.data(), 2), "half, of two tokens");
  active[0] = 0;
  PI2_CHECK(offload->mostly_missing(0, 0, active.data(), 2), "what is not");
  return 5;
}

}  // namespace

int main() {
  std::mt19937 rng(11);
  long cases = check_announcement(rng) + check_repeats(rng) + check_slices(rng) + check_route(rng) + check_record();
  cases += check_mostly_missing(rng);
  cases += check_bits(rng, 1, 1, 3, 1, 1, 1, DType::kF32, false);
  cases += check_bits(rng, 3, 70, 2, 33, 5, 2, DType::kBF16, false);
  cases += check_bits(rng, 4, 85, 3, 111, 70, 3, DType::kF16, false);
  cases += check_bits(rng, 5, 85, 3, 111, 11, 3, DType::kQ4, true);
  cases += check_bits(rng, 2, 1100, 3, 160, 3, 2, DType::kQ8, false);
  for (const Kind kind : {Kind::kNone, Kind::kLowrank, Kind::kSignbit}) {
    cases += check_store(rng, kind, DType::kQ4, true);
    cases += check_store(rng, kind, DType::kF32, false);
    cases += check_store(rng, kind, DType::kQ4, true, true);
    cases += check_store(rng, kind, DType::kF32, false, true);
    cases += check_early(rng, kind) + check_drop(rng, kind);
  }
  return finish("test_experts", cases);
}
