// What watched layers are counted to have fired, against sums of whole numbers, which are exact in any order: every
// path, format and instruction set; over stores; experts; calls at the same time; and nothing where nobody watches.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>

#include "ffn/firing.h"
#include "pi2/experts.h"
#include "pi2/kernels.h"
#include "pi2/offload.h"
#include "pi2/thread_pool.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

namespace {

using namespace pi2;
using namespace pi2_test;

const std::vector<std::int64_t> kGroups = {2, 3, 4, 13, 16, 64};

std::int64_t whole(std::mt19937& rng) { return static_cast<std::int64_t>(rng() % 5) - 2; }

// One stored row of whole numbers.
std::vector<char> row_of(const std::vector<std::int64_t>& values, DType dtype) {
  const auto n = static_cast<std::int64_t>(values.size());
  std::vector<char> out(static_cast<std::size_t>(row_bytes(dtype, n)));
  for (std::int64_t k = 0; k < (is_quantized(dtype) ? groups(n) * kGroup : n); ++k) {
    const std::int64_t value = k < n ? values[static_cast<std::size_t>(k)] : 0;
    const auto number = static_cast<float>(value);
    if (dtype == DType::kF32) {
      std::memcpy(&out[static_cast<std::size_t>(4 * k)], &number, 4);
    } else if (!is_quantized(dtype)) {
      const std::uint16_t half = dtype == DType::kBF16 ? narrow_bf16(number) : narrow_f16(number);
      std::memcpy(&out[static_cast<std::size_t>(2 * k)], &half, 2);
    } else if (dtype == DType::kQ8) {
      out[static_cast<std::size_t>(k)] = static_cast<char>(value);
    } else {
      const std::int64_t i = k % kGroup;
      char& byte = out[static_cast<std::size_t>(k / kGroup * 16 + i % 16)];
      byte = static_cast<char>(byte | (value + 8) << (i < 16 ? 0 : 4));
    }
  }
  const std::uint16_t one = narrow_f16(1);
  for (std::int64_t g = 0; is_quantized(dtype) && g < groups(n); ++g)
    std::memcpy(out.data() + out.size() - static_cast<std::size_t>(2 * (groups(n) - g)), &one, 2);
  return out;
}

// A layer of whole numbers, its input, and the scores of every token and neuron.
struct Layer {
  std::vector<char> neuron_rows;
  std::vector<float> x, y;
  std::vector<std::int64_t> scores;  // [tokens, neurons]
  std::vector<std::uint8_t> active;
  FfnArgs args;

  Layer(std::mt19937& rng, std::int64_t neurons, std::int64_t rows, std::int64_t hidden, std::int64_t tokens,
        DType dtype, bool on_up, bool a8) {
    std::vector<std::vector<std::int64_t>> w, x_TH;
    for (std::int64_t r = 0; r < neurons * rows; ++r) {
      w.emplace_back();
      for (std::int64_t k = 0; k < hidden; ++k) w.back().push_back(whole(rng));
      const std::vector<char> row = row_of(w.back(), dtype);
      neuron_rows.insert(neuron_rows.end(), row.begin(), row.end());
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
      x_TH.emplace_back();
      for (std::int64_t k = 0; k < hidden; ++k)  // rounding to int8 with the largest of a group as 127 changes nothing
        x_TH.back().push_back(a8 && k % kGroup == 0 ? 127 : whole(rng));
      for (const std::int64_t value : x_TH.back()) x.push_back(static_cast<float>(value));
    }
    const auto product = [&](std::int64_t t, std::int64_t row) {
      std::int64_t sum = 0;
      for (std::int64_t k = 0; k < hidden; ++k)
        sum += x_TH[static_cast<std::size_t>(t)][static_cast<std::size_t>(k)] *
               w[static_cast<std::size_t>(row)][static_cast<std::size_t>(k)];
      return std::max<std::int64_t>(0, sum);
    };
    for (std::int64_t t = 0; t < tokens; ++t)
      for (std::int64_t i = 0; i < neurons; ++i)
        scores.push_back(product(t, i * rows) * (on_up ? product(t, i * rows + 1) : 1));
    y.resize(x.size());
    args.x = x.data();
    args.y = y.data();
    args.tokens = tokens;
    args.hidden = hidden;
    args.neuron_rows = neuron_rows.data();
    args.w_dtype = dtype;
    args.neurons = neurons;
    args.rows = rows;
    args.activation_on_up = on_up;
    args.int8_activations = a8;
  }

  Layer(const Layer&) = delete;

  WatchedLayer watched(float cut) const { return {args.neuron_rows, -1, args.neurons, cut}; }

  bool fires(std::int64_t t, std::int64_t i, float cut) const {
    const bool asked =
        i < args.n_hot || args.active == nullptr || args.active[t * (args.neurons - args.n_hot) + i - args.n_hot] != 0;
    const auto score = static_cast<float>(scores[static_cast<std::size_t>(t * args.neurons + i)]);
    return asked && score > cut && (i < args.n_hot || score > args.threshold || args.activation_on_up);
  }

  // What `calls` calls must be counted as.
  FiringCounts wanted(float cut, std::int64_t calls, const std::vector<std::int64_t>& sizes) const {
    FiringCounts all;
    all.tokens = calls * args.tokens;
    all.groups.assign(sizes.size(), 0);
    for (std::int64_t i = 0; i < args.neurons; ++i) {
      std::int64_t fired = 0;
      for (std::int64_t t = 0; t < args.tokens; ++t) fired += fires(t, i, cut);
      all.fired.push_back(calls * fired);
    }
    for (std::size_t k = 0; k < sizes.size(); ++k) {
      const std::int64_t size = sizes[k], n = args.tokens > sizes.back() ? 0 : args.tokens / size;
      all.groups[k] = calls * n;
      for (std::int64_t i = 0; i < args.neurons; ++i) {
        std::int64_t grouped = 0;
        for (std::int64_t g = 0; g < n; ++g) {
          bool any = false;
          for (std::int64_t t = g * size; t < (g + 1) * size; ++t) any = any || fires(t, i, cut);
          grouped += any;
        }
        all.grouped.push_back(calls * grouped);
      }
    }
    return all;
  }
};

bool same(const FiringCounts& a, const FiringCounts& b) {
  return a.tokens == b.tokens && a.fired == b.fired && a.groups == b.groups && a.grouped == b.grouped;
}

std::unique_ptr<FiringWatch> watch(const std::vector<WatchedLayer>& layers,
                                   const std::vector<std::int64_t>& sizes = kGroups) {
  std::string problem;
  std::unique_ptr<FiringWatch> made = FiringWatch::start(layers, sizes, &problem);
  PI2_CHECK(made != nullptr, "%s", problem.c_str());
  return made;
}

long check_layer(std::mt19937& rng, ThreadPool* pool, std::int64_t neurons, std::int64_t rows, std::int64_t tokens,
                 DType dtype, bool a8) {
  const bool on_up = rows == 3 && rng() % 2 == 0;
  Layer layer(rng, neurons, rows, 70, tokens, dtype, on_up, a8);
  const float cut = rng() % 2 == 0 ? 0.0f : 3.0f;
  layer.args.threshold = on_up ? 0.0f : std::min(cut, static_cast<float>(rng() % 3));
  long cases = 0;
  for (const bool masked : {false, true}) {
    layer.args.n_hot = masked ? neurons / 3 : rng() % 2 * (neurons / 2);
    if (masked) {
      layer.active.resize(static_cast<std::size_t>(tokens * (neurons - layer.args.n_hot)));
      for (std::uint8_t& flag : layer.active) flag = rng() % 4 == 0;
    }
    layer.args.active = masked ? layer.active.data() : nullptr;
    sparse_ffn(layer.args, serial());
    const std::vector<float> before = layer.y;
    const auto counting = watch({layer.watched(cut)});
    sparse_ffn(layer.args, serial());
    PI2_CHECK(std::memcmp(before.data(), layer.y.data(), before.size() * sizeof(float)) == 0, "bits while watched");
    sparse_ffn(layer.args, pool->parallel());
    PI2_CHECK(same(counting->read(0, true), layer.wanted(cut, 2, kGroups)),
              "%s, %ld x %ld neurons, %ld tokens, dtype %d, int8 %d, masked %d, on up %d, cut %g, threshold %g",
              kernels().isa, static_cast<long>(neurons), static_cast<long>(rows), static_cast<long>(tokens),
              static_cast<int>(dtype), a8, masked, on_up, cut, layer.args.threshold);
    PI2_CHECK(same(counting->read(0, false), layer.wanted(cut, 0, kGroups)), "counts after a reset");
    cases += 3;
  }
  return cases;
}

long check_off(std::mt19937& rng) {
  const Layer layer(rng, 100, 3, 16, 3, DType::kF32, false, false), other(rng, 90, 3, 16, 3, DType::kF32, false, false);
  PI2_CHECK(firing_watched.load() == 0, "somebody watches");
  sparse_ffn(layer.args, serial());
  auto counting = watch({layer.watched(0), other.watched(0)});
  PI2_CHECK(firing_watched.load() == 2 && counting->layers() == 2, "two layers");
  PI2_CHECK(same(counting->read(0, false), layer.wanted(0, 0, kGroups)), "what was before it began");
  sparse_ffn(layer.args, serial());
  PI2_CHECK(same(counting->read(0, false), layer.wanted(0, 1, kGroups)), "the first");
  PI2_CHECK(same(counting->read(1, false), other.wanted(0, 0, kGroups)), "the other was not called");
  PI2_CHECK(counting->tokens() == 3, "%ld tokens", static_cast<long>(counting->tokens()));
  FfnArgs another = layer.args;  // whoever has got the memory of what was watched
  another.neurons = 50;
  sparse_ffn(another, serial());
  PI2_CHECK(counting->tokens() == 3, "a layer of other sizes at the same place");
  std::string problem;
  PI2_CHECK(FiringWatch::start({layer.watched(1)}, {}, &problem) == nullptr && problem == "layer 0 is watched already",
            "%s", problem.c_str());
  for (const std::vector<std::int64_t>& sizes :
       {std::vector<std::int64_t>{1}, {4, 2}, {2, 2}, {65}, std::vector<std::int64_t>(17, 2)})
    PI2_CHECK(FiringWatch::start({}, sizes, &problem) == nullptr &&
                  problem.rfind("sizes: expected at most 16, ascending from 2 to 64, found ", 0) == 0,
              "%s", problem.c_str());
  const Layer third(rng, 20, 3, 16, 1, DType::kF32, false, false);
  PI2_CHECK(FiringWatch::start({third.watched(0), other.watched(0)}, {}, &problem) == nullptr &&
                problem == "layer 1 is watched already",
            "%s", problem.c_str());
  counting = nullptr;
  PI2_CHECK(firing_watched.load() == 0, "nobody watches");
  counting = watch({third.watched(0), layer.watched(0)}, {});  // the third was not left behind
  sparse_ffn(layer.args, serial());
  PI2_CHECK(same(counting->read(1, false), layer.wanted(0, 1, {})), "without groups");
  return 16;
}

// More tokens than two bytes can count: in one call, and in many.
long check_overflow(std::mt19937& rng) {
  const Layer one(rng, 5, 2, 4, 95'000, DType::kF32, false, false), few(rng, 5, 2, 4, 60, DType::kF32, false, false);
  const auto counting = watch({one.watched(0), few.watched(0)});
  for (int i = 0; i < 2; ++i) sparse_ffn(one.args, serial());
  for (int i = 0; i < 3600; ++i) sparse_ffn(few.args, serial());
  for (const FiringCounts& counts : {counting->read(0, false), counting->read(1, false)})
    PI2_CHECK(*std::max_element(counts.fired.begin(), counts.fired.end()) > 65535, "nothing to overflow");
  PI2_CHECK(same(counting->read(0, false), one.wanted(0, 2, kGroups)), "one call");
  PI2_CHECK(same(counting->read(1, false), few.wanted(0, 3600, kGroups)), "many calls");
  return 2;
}

// Two threads with calls of the same layer, and one that reads: nothing is lost, and nobody waits for ever.
long check_threads(std::mt19937& rng) {
  Layer layer(rng, 300, 3, 33, 4, DType::kBF16, false, false);
  ThreadPool pools[] = {ThreadPool(2), ThreadPool(2)};
  constexpr std::int64_t kCalls = 150;
  auto counting = watch({layer.watched(0)});
  std::atomic<std::int64_t> over{0};
  std::vector<std::thread> threads;
  for (ThreadPool& pool : pools) {
    threads.emplace_back([&layer, &pool, &over] {
      std::vector<float> y(layer.y.size());
      FfnArgs args = layer.args;
      args.y = y.data();
      for (std::int64_t i = 0; i < kCalls; ++i) sparse_ffn(args, pool.parallel());
      over.fetch_add(1);
    });
  }
  FiringCounts sum = layer.wanted(0, 0, kGroups);
  const auto add = [&sum](const FiringCounts& more) {
    sum.tokens += more.tokens;
    for (std::size_t i = 0; i < sum.fired.size(); ++i) sum.fired[i] += more.fired[i];
    for (std::size_t i = 0; i < sum.groups.size(); ++i) sum.groups[i] += more.groups[i];
    for (std::size_t i = 0; i < sum.grouped.size(); ++i) sum.grouped[i] += more.grouped[i];
  };
  while (over.load() < 2) add(counting->read(0, true));
  for (std::thread& thread : threads) thread.join();
  add(counting->read(0, true));
  PI2_CHECK(same(sum, layer.wanted(0, 2 * kCalls, kGroups)), "%ld of %ld tokens", static_cast<long>(sum.tokens),
            static_cast<long>(2 * kCalls * layer.args.tokens));

  // Ends while calls are under way.
  over = 0;
  std::thread caller([&] {
    while (over.load() == 0) sparse_ffn(layer.args, pools[0].parallel());
  });
  for (int i = 0; i < 50; ++i) counting = nullptr, counting = watch({layer.watched(0)});
  over = 1;
  caller.join();
  PI2_CHECK(counting->read(0, false).tokens % layer.args.tokens == 0, "parts of calls");
  return 2;
}

// What is counted of a layer over a store is what is counted of the same neurons in memory: decoding, prompts in tiles
// of tokens, prompts by panels, with and without a predictor.
long check_store(std::mt19937& rng, ThreadPool* pool, DType dtype, bool a8) {
  const StoreFixture file(rng, 2, 700, 3, 70, dtype);
  std::string problem;
  OffloadOptions options;
  options.cache_bytes = 100'000;
  const std::unique_ptr<Offload> store = Offload::open(file.path, options, &problem);
  PI2_CHECK(store != nullptr, "%s", problem.c_str());
  if (store == nullptr) return 0;
  const char* neuron_rows = file.neuron_rows[1].data();
  const auto counting = watch({{store.get(), 1, 700, 0}, {neuron_rows, -1, 700, 0}});
  std::vector<char> signs;
  for (std::int64_t i = 0; i < 500 * sign_bytes(70); ++i) signs.push_back(static_cast<char>(rng()));
  long cases = 0;
  for (const std::int64_t tokens : {1, 4, 31, 32, 50, 64, 65, 520}) {
    for (const bool predicted : {false, true}) {
      const std::vector<float> x = floats(rng, tokens * 70);
      std::vector<float> y(x.size());
      FfnArgs args = store->shape(1);
      args.x = x.data();
      args.y = y.data();
      args.tokens = tokens;
      args.int8_activations = a8;
      args.n_hot = 200;
      Predictor predictor;
      if (predicted) predictor.kind = Predictor::Kind::kSignbit;
      predictor.signbit.columns = 70;
      predictor.signbit.cold = 500;
      predictor.signbit.signs = signs.data();
      predictor.signbit.margin = 0.95;
      PI2_CHECK(store->ffn(1, predictor, args, pool->parallel()).empty(), "reading failed");
      args.neuron_rows = neuron_rows;
      predicted_ffn(predictor, args, serial());
      const FiringCounts there = counting->read(0, true), here = counting->read(1, true);
      std::int64_t fired = 0;
      for (const std::int64_t n : here.fired) fired += n;
      PI2_CHECK(same(there, here) && here.tokens == tokens && fired > 0, "%ld tokens, predicted %d, dtype %d, int8 %d",
                static_cast<long>(tokens), predicted, static_cast<int>(dtype), a8);
      ++cases;
    }
  }
  return cases;
}

// The last piece of a long prompt, which a mask for all of it would have been too large for, is no decoding step.
long check_pieces(std::mt19937& rng) {
  Layer layer(rng, 64, 2, 4, 0, DType::kF32, false, false);
  layer.args.tokens = kMaskBytes / 64 / 512 * 512 + 4;
  const std::vector<float> x = floats(rng, layer.args.tokens * 4);
  std::vector<float> y(x.size());
  layer.args.x = x.data();
  layer.args.y = y.data();
  const std::vector<char> signs(64 * static_cast<std::size_t>(sign_bytes(4)));
  Predictor predictor;
  predictor.kind = Predictor::Kind::kSignbit;
  predictor.signbit.columns = 4;
  predictor.signbit.cold = 64;
  predictor.signbit.signs = signs.data();
  const auto counting = watch({layer.watched(0)});
  predicted_ffn(predictor, layer.args, serial());
  const FiringCounts found = counting->read(0, false);
  PI2_CHECK(found.tokens == layer.args.tokens, "%ld tokens", static_cast<long>(found.tokens));
  for (const std::int64_t groups : found.groups) PI2_CHECK(groups == 0, "%ld groups", static_cast<long>(groups));
  return 2;
}

// Experts have the tokens that the router gave them.
long check_experts(std::mt19937& rng) {
  constexpr std::int64_t kExperts = 3, kTokens = 11;
  Layer all(rng, 120 * kExperts, 3, 20, kTokens, DType::kF32, false, false);
  std::vector<WatchedLayer> watched;
  const std::int64_t bytes = 120 * 3 * row_bytes(DType::kF32, 20);
  for (std::int64_t e = 0; e < kExperts; ++e) watched.push_back({all.neuron_rows.data() + e * bytes, -1, 120, 0});
  ExpertStack stack;
  stack.layer = all.args;
  stack.layer.neurons = 120;
  std::vector<std::int64_t> index, tokens(kExperts);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    index.push_back(static_cast<std::int64_t>(rng() % (kExperts + 1)));
    if (index.back() < kExperts) ++tokens[static_cast<std::size_t>(index.back())];
  }
  const std::vector<float> routing(kTokens, 1.0f);
  const ExpertsArgs args = {all.x.data(), all.y.data(),   DType::kF32, kTokens, 20,
                            index.data(), routing.data(), DType::kF32, 1,       kExperts};
  const auto counting = watch(watched, {});
  PI2_CHECK(experts_ffn(args, stack, serial()).empty(), "experts");
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const FiringCounts found = counting->read(e, false);
    std::vector<std::int64_t> fired(120);
    for (std::int64_t t = 0; t < kTokens; ++t)
      for (std::int64_t i = 0; i < 120; ++i)
        fired[static_cast<std::size_t>(i)] += index[static_cast<std::size_t>(t)] == e && all.fires(t, e * 120 + i, 0);
    PI2_CHECK(found.tokens == tokens[static_cast<std::size_t>(e)] && found.fired == fired, "expert %ld",
              static_cast<long>(e));
  }
  return kExperts;
}

}  // namespace

int main() {
  std::mt19937 rng(8);
  long cases = 0;
  int count = 0;
  ThreadPool pool(3);
  const KernelTable* const* tables = available_kernels(&count);
  for (int i = first_of(count); i < count; ++i) {
    PI2_CHECK(select_kernels(tables[i]->isa), "cannot select %s", tables[i]->isa);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kQ4, DType::kQ8}) {
      for (const bool a8 : {false, true}) {
        if (a8 && !is_quantized(dtype)) continue;
        for (const std::int64_t tokens : {1, 2, 3, 16, 17, 64, 70, 140})
          cases += check_layer(rng, &pool, 211, 2 + tokens % 2, tokens, dtype, a8);
        cases += check_layer(rng, &pool, 1100, 3, 4, dtype, a8);          // enough arithmetic for threads
        if (i + 1 == count) cases += check_store(rng, &pool, dtype, a8);  // the best, which may have panels
      }
    }
  }
  cases += check_off(rng) + check_overflow(rng) + check_threads(rng) + check_pieces(rng) + check_experts(rng);
  return finish("test_firing", cases);
}
