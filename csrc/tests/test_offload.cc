// Layers from a store against the same layers in memory: the same bits for every engine, policy, budget and number of
// threads; and what happens when reading goes wrong.
#include <fcntl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "pi2/offload.h"
#include "pi2/thread_pool.h"
#include "tests/store_fixture.h"

namespace {

using namespace pi2;
using namespace pi2_test;

struct Inputs {
  std::vector<float> x, y;
  std::vector<std::uint8_t> active;
  std::vector<float> bias_gate, bias_down;
};

Inputs inputs(std::mt19937& rng, const StoreLayer& l, std::int64_t tokens, unsigned one_in) {
  Inputs in;
  in.x = floats(rng, tokens * l.hidden);
  in.y.assign(static_cast<std::size_t>(tokens * l.hidden), -1.0f);
  for (std::int64_t i = 0; i < tokens * (l.neurons - l.n_hot); ++i) in.active.push_back(rng() % one_in == 0);
  in.bias_gate = floats(rng, l.neurons);
  in.bias_down = floats(rng, l.hidden);
  return in;
}

FfnArgs arguments(const StoreLayer& l, Inputs* in, std::int64_t tokens, bool masked) {
  FfnArgs args;
  args.x = in->x.data();
  args.y = in->y.data();
  args.tokens = tokens;
  args.hidden = l.hidden;
  args.neurons = l.neurons;
  args.rows = l.rows;
  args.w_dtype = l.w_dtype;
  args.down_dtype = l.down_dtype;
  args.other_down = l.other_down;
  args.n_hot = l.n_hot;
  args.active = masked ? in->active.data() : nullptr;
  if (is_quantized(args.dtype_of_down())) {
    if (l.rows == 3) args.bias_gate = in->bias_gate.data();
    args.bias_down = in->bias_down.data();
  }
  return args;
}

std::unique_ptr<Offload> opened(const StoreFixture& store, const OffloadOptions& options) {
  std::string problem;
  std::unique_ptr<Offload> offload = Offload::open(store.path, options, &problem);
  if (problem.find("io_uring is not available") != std::string::npos) return nullptr;
  PI2_CHECK(offload != nullptr, "%s", problem.c_str());
  return offload;
}

long check_bits(std::mt19937& rng, std::int64_t neurons, std::int64_t rows, std::int64_t hidden, DType dtype,
                std::int64_t n_hot, std::int64_t cluster = 1, const DType* down = nullptr, bool apart = false) {
  const StoreFixture store(rng, 2, neurons, rows, hidden, dtype, n_hot, cluster, down, apart);
  long cases = 0;
  const std::int64_t neuron = (store.layers[0].neuron_bytes() + 63) / 64 * 64;  // a slot's share of the cache, about
  std::vector<OffloadOptions> all;
  for (const char* engine : {"pread", "io_uring", "mmap"}) {
    for (const char* policy : {"lru", "sieve", "static"}) {
      for (const std::int64_t slots : {std::int64_t{0}, std::int64_t{5}, neurons / 3, 2 * neurons}) {
        OffloadOptions options;
        options.engine = engine;
        options.policy = policy;
        options.cache_bytes = slots * neuron;
        options.direct = slots != 5;
        options.pipeline = slots != neurons / 3;
        options.in_flight = 1 + slots % 3;
        options.io_threads = 3;
        options.run_bytes = slots == 5 ? 1 : 4096;
        options.gap_bytes = slots == neurons / 3 ? 2048 : 0;
        options.window = slots == 5 ? 2 : 0;
        options.hot_share = slots == 5 ? 0.0 : 0.7;
        all.push_back(options);
        if (std::strcmp(engine, "mmap") == 0) break;
      }
    }
  }
  for (const OffloadOptions& options : all) {
    const std::unique_ptr<Offload> offload = opened(store, options);
    if (offload == nullptr) continue;
    if (cases % 2 == 0) {
      const std::string wrong = offload->preload();
      PI2_CHECK(wrong.empty(), "%s", wrong.c_str());
    }
    std::int64_t calls = 0;
    constexpr std::int64_t kTokens[] = {1, 1, 1, 1, 3, 3, 40, 515, 20, 515};  // 12 or 32 and more: streamed
    for (int round = 0; round < 10; ++round) {
      const std::int64_t layer = round % 2, tokens = kTokens[round];
      if (tokens > 40 && store.layers[0].neurons * store.layers[0].neuron_bytes() > (1 << 18))
        continue;  // in memory that takes long
      const StoreLayer& l = store.layers[static_cast<std::size_t>(layer)];
      Inputs in = inputs(rng, l, tokens, round == 3 ? 1 : tokens > 3 ? 100 : 5);
      FfnArgs args = arguments(l, &in, tokens, round != 2 && round < 8);
      args.int8_activations = round >= 8 && is_quantized(args.dtype_of_down());
      args.neuron_rows = store.neuron_rows[static_cast<std::size_t>(layer)].data();
      sparse_ffn(args, serial());
      const std::vector<float> wanted = in.y;
      std::fill(in.y.begin(), in.y.end(), -1.0f);
      args.neuron_rows = nullptr;
      ThreadPool pool(1 + round % 3);
      // A guess that is right for some neurons, as early as can be; a wrong one while the layer is computed.
      if (round > 2) offload->prefetch(layer, args.n_hot, in.active.data(), 1);
      const auto guess = [&] { offload->prefetch(1 - layer, args.n_hot, in.active.data(), tokens); };
      const std::string wrong = offload->ffn(layer, Predictor(), args, pool.parallel(), guess);
      PI2_CHECK(wrong.empty(), "%s", wrong.c_str());
      PI2_CHECK(std::memcmp(wanted.data(), in.y.data(), wanted.size() * sizeof(float)) == 0,
                "%s %s, %ld bytes: round %d differs", options.engine.c_str(), options.policy.c_str(),
                static_cast<long>(options.cache_bytes), round);
      ++cases;
      ++calls;
    }
    const OffloadStats stats = offload->stats(true);
    PI2_CHECK(stats.calls == calls && stats.hits <= stats.wanted && stats.resident <= stats.slots, "statistics");
    if (options.engine != "mmap") {
      PI2_CHECK(stats.cache_bytes <= options.cache_bytes, "%ld bytes of cache", static_cast<long>(stats.cache_bytes));
      PI2_CHECK((stats.bytes_read == 0) == (stats.reads == 0) &&
                    (apart || stats.reads <= stats.wanted - stats.hits + stats.guessed) && stats.used <= stats.guessed,
                "%ld reads for %ld neurons and %ld guesses", static_cast<long>(stats.reads),
                static_cast<long>(stats.wanted - stats.hits), static_cast<long>(stats.guessed));
      PI2_CHECK(options.cache_bytes > 0 || stats.hits == 0, "hits without a cache");
    }
    PI2_CHECK(offload->stats(false).wanted == 0, "reset");
  }
  return cases;
}

// While a prompt is in one layer the next one is read, into memory that is given back if it is not wanted after all.
long check_ahead(std::mt19937& rng) {
  const StoreFixture store(rng, 3, 700, 3, 64, DType::kQ4);
  OffloadOptions options;
  options.engine = "pread";
  ThreadPool pool(2);
  long cases = 0;
  for (const std::int64_t in_flight : {1, 8}) {
    options.in_flight = in_flight;
    options.cache_bytes = in_flight == 1 ? 0 : 50 * 192;
    const std::unique_ptr<Offload> offload = opened(store, options);
    // Three times through; then another layer than the next, few tokens, and streams again.
    for (const std::int64_t layer : {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 2, 0, -1, 0, 1, 2}) {
      const std::int64_t tokens = layer < 0 ? 1 : 40;
      const StoreLayer& l = store.layers[static_cast<std::size_t>(std::max<std::int64_t>(layer, 0))];
      Inputs in = inputs(rng, l, tokens, 1);
      FfnArgs args = arguments(l, &in, tokens, cases % 2 == 0);
      args.neuron_rows = store.neuron_rows[static_cast<std::size_t>(std::max<std::int64_t>(layer, 0))].data();
      sparse_ffn(args, serial());
      const std::vector<float> wanted = in.y;
      args.neuron_rows = nullptr;
      offload->stats(true);
      const std::string wrong = offload->ffn(std::max<std::int64_t>(layer, 0), Predictor(), args, pool.parallel());
      PI2_CHECK(wrong.empty() && wanted == in.y, "layer %ld: '%s'", static_cast<long>(layer), wrong.c_str());
      const OffloadStats stats = offload->stats(false);
      if (cases % 16 > 3 && layer > 0 && cases % 16 != 10 && cases % 16 != 14)
        PI2_CHECK(stats.used >= 64, "%ld of layer %ld were there", static_cast<long>(stats.used),
                  static_cast<long>(layer));
      else if (cases % 16 == 10 || cases % 16 == 14 || layer < 0)
        PI2_CHECK(stats.used == 0, "%ld were there", static_cast<long>(stats.used));
      ++cases;
    }
  }
  return cases;
}

// A margin for what is not in memory, in a cache whose first neurons stay: the bits of the layer whose mask leaves out
// what is neither there nor sure, or wanted by another token of the call. Predictors of rank 0: biases decide.
long check_margin(std::mt19937& rng, std::int64_t n_hot, std::int64_t cluster) {
  const StoreFixture store(rng, 2, 300, 3, 64, DType::kQ4, n_hot, cluster);
  const StoreLayer& l = store.layers[1];
  const std::int64_t cold = l.neurons - n_hot;
  std::vector<float> bias, scale(static_cast<std::size_t>(cold), 1.0f);
  for (std::int64_t i = 0; i < cold; ++i) bias.push_back(0.1f * static_cast<float>(rng() % 40));  // 0 to 3.9
  Predictor predictor;
  predictor.kind = Predictor::Kind::kLowrank;
  predictor.lowrank.hidden = l.hidden;
  predictor.lowrank.a = predictor.lowrank.b = bias.data();  // of no rows and of no columns
  predictor.lowrank.a_scale = predictor.lowrank.b_scale = scale.data();
  predictor.lowrank.b_bias = bias.data();
  predictor.lowrank.threshold = 1.05f;
  predictor.lowrank.doubt = 1.5f;
  long cases = 0;
  for (const char* policy : {"static", "none", "whole"}) {
    OffloadOptions options;
    options.engine = "pread";
    options.policy = policy[0] == 'w' ? "lfu" : policy;
    options.hot_share = 0;
    options.miss_margin = 1.5;
    // Half of each layer's neurons, the first ones.
    options.cache_bytes = l.n_slots() / (policy[0] == 'w' ? 1 : 2) * 2 * l.slot_bytes;
    const std::unique_ptr<Offload> offload = opened(store, options);
    PI2_CHECK(offload->preload().empty() && offload->miss_margin() == 1.5, "preload");
    const std::int64_t there = offload->stats(true).resident / 2 * cluster;
    for (const std::int64_t tokens : {1, 3, 40}) {
      Inputs in = inputs(rng, l, tokens, 1);
      std::int64_t left_out = 0;
      for (std::int64_t i = 0; i < cold; ++i) {
        const float score = bias[static_cast<std::size_t>(i)];
        const bool wanted = score >= 1.05f, sure = score >= 1.05f + 1.5f || n_hot + i < there || tokens >= kStreamFrom;
        left_out += wanted && !sure;
        for (std::int64_t t = 0; t < tokens; ++t)
          in.active[static_cast<std::size_t>(t * cold + i)] = wanted && sure ? 1 : 0;
      }
      FfnArgs args = arguments(l, &in, tokens, true);
      args.neuron_rows = store.neuron_rows[1].data();
      sparse_ffn(args, serial());
      const std::vector<float> wanted = in.y;
      args.neuron_rows = nullptr;
      args.active = nullptr;
      ThreadPool pool(2);
      const std::string wrong = offload->ffn(1, predictor, args, pool.parallel());
      PI2_CHECK(wrong.empty() && wanted == in.y, "%s, %ld tokens: '%s'", policy, static_cast<long>(tokens),
                wrong.c_str());
      const std::int64_t found = offload->stats(true).left_out;
      PI2_CHECK(found == left_out && (left_out > 0) == (tokens < 32 && policy[0] != 'w'), "%s, %ld tokens: %ld of %ld",
                policy, static_cast<long>(tokens), static_cast<long>(found), static_cast<long>(left_out));
      ++cases;
    }
  }
  return cases;
}

// What one token is sure of is there for others of the same call that are not.
long check_margin_of_several(std::mt19937& rng) {
  const StoreFixture store(rng, 1, 64, 3, 64, DType::kQ4);
  const StoreLayer& l = store.layers[0];
  // Neuron i scores x[0] - i: rank 1, of a token's first number.
  std::vector<std::int8_t> a(static_cast<std::size_t>(l.hidden), 0), b(64, 1);
  a[0] = 1;
  std::vector<float> ones(64, 1.0f), bias;
  for (int i = 0; i < 64; ++i) bias.push_back(static_cast<float>(-i));
  Predictor predictor;
  predictor.kind = Predictor::Kind::kLowrank;
  LowrankArgs& args = predictor.lowrank;
  args.hidden = l.hidden;
  args.rank = 1;
  args.a = a.data();
  args.b = b.data();
  args.a_scale = args.b_scale = ones.data();
  args.b_bias = bias.data();
  args.doubt = 10;
  OffloadOptions options;
  options.engine = "pread";
  options.policy = "none";
  options.miss_margin = 10;
  const std::unique_ptr<Offload> offload = opened(store, options);
  Inputs in = inputs(rng, l, 2, 1);
  in.x[0] = 40.5f;                                   // sure of neurons 0 to 30, wants 31 to 40
  in.x[static_cast<std::size_t>(l.hidden)] = 35.5f;  // 0 to 25, and 26 to 35: of them the other is sure up to 30
  for (std::int64_t i = 0; i < 64; ++i)
    in.active[static_cast<std::size_t>(i)] = in.active[static_cast<std::size_t>(64 + i)] = i <= 30;
  FfnArgs layer = arguments(l, &in, 2, true);
  layer.neuron_rows = store.neuron_rows[0].data();
  sparse_ffn(layer, serial());
  const std::vector<float> wanted = in.y;
  layer.neuron_rows = nullptr;
  layer.active = nullptr;
  const std::string wrong = offload->ffn(0, predictor, layer, serial());
  PI2_CHECK(wrong.empty() && wanted == in.y, "'%s'", wrong.c_str());
  PI2_CHECK(offload->stats(false).left_out == 10, "%ld", static_cast<long>(offload->stats(false).left_out));
  return 1;
}

// A prompt that goes in two slices of its mask, the last of which is short: nothing of it is left out.
long check_margin_of_a_long_prompt(std::mt19937& rng) {
  constexpr std::int64_t kNeurons = kMaskBytes / kPromptTokens, kTokens = kPromptTokens + 5;
  const StoreFixture store(rng, 1, kNeurons, 2, 64, DType::kQ4);
  const std::vector<float> ones(static_cast<std::size_t>(kNeurons), 1.0f);
  std::vector<float> bias(static_cast<std::size_t>(kNeurons), 0.0f);
  for (std::int64_t i = 0; i < kNeurons; i += 512) bias[static_cast<std::size_t>(i)] = 1.5f;
  Predictor predictor;
  predictor.kind = Predictor::Kind::kLowrank;
  predictor.lowrank.hidden = 64;
  predictor.lowrank.a = predictor.lowrank.b = bias.data();  // of no rows and of no columns
  predictor.lowrank.a_scale = predictor.lowrank.b_scale = ones.data();
  predictor.lowrank.b_bias = bias.data();
  predictor.lowrank.threshold = 1;
  const Inputs in = inputs(rng, store.layers[0], kTokens, 1);
  std::vector<std::vector<float>> found;
  for (const float margin : {0.0f, 10.0f}) {
    OffloadOptions options;
    options.engine = "pread";
    options.policy = "none";
    options.miss_margin = predictor.lowrank.doubt = margin;
    const std::unique_ptr<Offload> offload = opened(store, options);
    Inputs mine = in;
    FfnArgs args = arguments(store.layers[0], &mine, kTokens, true);
    args.active = nullptr;
    const std::string wrong = offload->ffn(0, predictor, args, serial());
    const std::int64_t left_out = offload->stats(false).left_out;
    PI2_CHECK(wrong.empty() && left_out == 0, "'%s', %ld left out", wrong.c_str(), static_cast<long>(left_out));
    found.push_back(mine.y);
  }
  PI2_CHECK(found[0] == found[1], "a margin changed a prompt");
  return 2;
}

// What was in the cache when the next layer was read ahead, and so was passed over, has left when that layer begins.
long check_ahead_and_resize(std::mt19937& rng) {
  const StoreFixture store(rng, 2, 2048, 3, 64, DType::kQ4);
  OffloadOptions options;
  options.engine = "pread";
  options.in_flight = 1;
  options.cache_bytes = 2 * 512 * 192;
  const std::unique_ptr<Offload> offload = opened(store, options);
  PI2_CHECK(offload->preload().empty(), "preload");
  for (const std::int64_t layer : {0, 1}) {
    const StoreLayer& l = store.layers[static_cast<std::size_t>(layer)];
    Inputs in = inputs(rng, l, 40, 1);
    FfnArgs args = arguments(l, &in, 40, false);
    args.neuron_rows = store.neuron_rows[static_cast<std::size_t>(layer)].data();
    sparse_ffn(args, serial());
    const std::vector<float> wanted = in.y;
    args.neuron_rows = nullptr;
    const std::string wrong = offload->ffn(layer, Predictor(), args, serial());
    PI2_CHECK(wrong.empty() && wanted == in.y, "layer %ld: '%s'", static_cast<long>(layer), wrong.c_str());
    const std::string resized = offload->resize(0, 0.5);
    PI2_CHECK(resized.empty(), "%s", resized.c_str());
  }
  return 2;
}

// A whole cache: nothing is read twice. A flipped byte: an error that says where, as often as it is asked for, and
// right results before and after.
long check_faults(std::mt19937& rng) {
  StoreFixture store(rng, 2, 300, 3, 64, DType::kQ4);
  OffloadOptions options;
  options.cache_bytes = 1 << 20;
  options.engine = "pread";
  const StoreLayer& l = store.layers[1];
  Inputs in = inputs(rng, l, 1, 3);
  std::fill(in.active.begin(), in.active.begin() + 100, static_cast<std::uint8_t>(1));
  FfnArgs args = arguments(l, &in, 1, true);
  args.neuron_rows = store.neuron_rows[1].data();
  sparse_ffn(args, serial());
  const std::vector<float> wanted = in.y;
  args.neuron_rows = nullptr;
  ThreadPool pool(2);
  const auto same = [&] { return std::memcmp(wanted.data(), in.y.data(), wanted.size() * sizeof(float)) == 0; };
  const auto flip = [&](std::int64_t at) {
    const int file = open(store.path.c_str(), O_RDWR);
    char byte = 0;
    PI2_CHECK(pread(file, &byte, 1, at) == 1, "pread");
    byte = static_cast<char>(byte ^ 16);
    PI2_CHECK(pwrite(file, &byte, 1, at) == 1, "pwrite");
    close(file);
  };
  for (const bool pipeline : {true, false}) {
    options.pipeline = pipeline;
    const std::unique_ptr<Offload> offload = opened(store, options);
    const std::int64_t bad = l.slots + 42 * l.slot_bytes + 17;
    flip(bad);
    for (int i = 0; i < 3; ++i) {
      const std::string found = offload->ffn(1, Predictor(), args, pool.parallel());
      PI2_CHECK(found == "layer 1, neuron 42 at " + std::to_string(l.slots + 42 * l.slot_bytes) +
                             ": its checksum does not match",
                "found '%s'", found.c_str());
    }
    Inputs other = inputs(rng, store.layers[0], 1, 2);
    PI2_CHECK(offload->ffn(0, Predictor(), arguments(store.layers[0], &other, 1, true), pool.parallel()).empty(),
              "another layer");
    flip(bad);
    PI2_CHECK(offload->ffn(1, Predictor(), args, pool.parallel()).empty() && same(), "after the repair");
    offload->stats(true);
    PI2_CHECK(offload->ffn(1, Predictor(), args, pool.parallel()).empty() && same(), "from the cache");
    PI2_CHECK(offload->stats(false).bytes_read == 0, "read again");
  }
  // Slots' padding is nobody's: not checked, not read.
  const std::unique_ptr<Offload> padded = opened(store, options);
  flip(l.slots + 43 * l.slot_bytes + l.neuron_bytes());
  PI2_CHECK(padded->ffn(1, Predictor(), args, pool.parallel()).empty() && same(), "padding");
  // The file becomes shorter while it is open.
  const std::unique_ptr<Offload> cut = opened(store, options);
  PI2_CHECK(truncate(store.path.c_str(), l.slots + 10 * l.slot_bytes) == 0, "truncate");
  const std::string found = cut->ffn(1, Predictor(), args, pool.parallel());
  PI2_CHECK(found.find("layer 1, neuron ") == 0 && found.find("Input/output error") != std::string::npos, "found '%s'",
            found.c_str());
  PI2_CHECK(cut->preload().find("Input/output error") != std::string::npos, "preload of a file cut short");
  store.write();
  PI2_CHECK(cut->ffn(1, Predictor(), args, pool.parallel()).empty() && same(), "after it is whole again");
  return 12;
}

// The cache is filled with the most frequent neurons of every layer, and the least frequent of them leave first.
long check_preload(std::mt19937& rng) {
  const StoreFixture store(rng, 2, 100, 3, 64, DType::kQ4);
  OffloadOptions options;
  options.cache_bytes = 40 * ((store.layers[0].neuron_bytes() + 63) / 64 * 64);
  options.direct = false;  // its places are multiples of a sector
  options.hot_share = 0;
  const std::unique_ptr<Offload> offload = opened(store, options);
  PI2_CHECK(offload->preload().empty() && offload->stats(true).resident == 40, "20 of each layer");
  const StoreLayer& l = store.layers[0];
  Inputs in = inputs(rng, l, 1, 2);
  const auto hits = [&](std::int64_t layer, std::int64_t first, std::int64_t last) {
    std::fill(in.active.begin(), in.active.end(), static_cast<std::uint8_t>(0));
    std::fill(in.active.begin() + first, in.active.begin() + last, static_cast<std::uint8_t>(1));
    PI2_CHECK(offload->ffn(layer, Predictor(), arguments(l, &in, 1, true), serial()).empty(), "a call");
    return offload->stats(true).hits;
  };
  PI2_CHECK(hits(0, 90, 100) == 0, "ten that are not there; the rarest five of each layer leave");
  PI2_CHECK(hits(0, 0, 15) == 15 && hits(1, 0, 15) == 15, "the most frequent stay");
  PI2_CHECK(hits(0, 15, 20) == 0, "the rarest have left");
  return 4;
}

// What was guessed right is not read again, in whatever moment it comes; a guess that cannot be read does no harm.
long check_prefetch(std::mt19937& rng) {
  StoreFixture store(rng, 2, 300, 3, 64, DType::kQ4);
  OffloadOptions options;
  options.cache_bytes = 1 << 20;
  const std::unique_ptr<Offload> offload = opened(store, options);
  const StoreLayer& l = store.layers[1];
  Inputs in = inputs(rng, l, 1, 3);
  const FfnArgs args = arguments(l, &in, 1, true);
  offload->prefetch(1, 0, in.active.data(), 1);
  PI2_CHECK(offload->ffn(1, Predictor(), args, serial()).empty(), "a call");
  OffloadStats stats = offload->stats(true);
  PI2_CHECK(stats.guessed == stats.wanted && stats.used == stats.wanted && stats.hits == 0 && stats.wanted > 50,
            "%ld guessed, %ld used of %ld", static_cast<long>(stats.guessed), static_cast<long>(stats.used),
            static_cast<long>(stats.wanted));
  const std::int64_t read = stats.bytes_read;
  PI2_CHECK(offload->ffn(1, Predictor(), args, serial()).empty(), "a call");
  stats = offload->stats(true);
  PI2_CHECK(stats.hits == stats.wanted && stats.bytes_read == 0 && read > 0, "they are in the cache");
  // Of layer 0 nothing can be read.
  PI2_CHECK(truncate(store.path.c_str(), store.layers[0].slots) == 0, "truncate");
  offload->prefetch(0, 0, nullptr, 1);
  PI2_CHECK(offload->ffn(1, Predictor(), args, serial()).empty(), "a call while a guess fails");
  Inputs other = inputs(rng, store.layers[0], 1, 3);
  const FfnArgs first = arguments(store.layers[0], &other, 1, true);
  PI2_CHECK(offload->ffn(0, Predictor(), first, serial()).find("layer 0, neuron ") == 0, "what it was a guess about");
  store.write();
  PI2_CHECK(offload->ffn(0, Predictor(), first, serial()).empty(), "when it is whole again");
  return 8;
}

// Two threads on one store, and two stores of one file.
long check_company(std::mt19937& rng) {
  const StoreFixture store(rng, 2, 200, 3, 64, DType::kQ4);
  OffloadOptions options;
  options.cache_bytes = 40 * 320;
  options.io_threads = 4;
  const std::unique_ptr<Offload> shared = opened(store, options), own = opened(store, options);
  std::vector<Inputs> in;
  std::vector<std::vector<float>> wanted;
  for (int i = 0; i < 4; ++i) {
    in.push_back(inputs(rng, store.layers[0], 1, 3));
    FfnArgs args = arguments(store.layers[0], &in.back(), 1, true);
    args.neuron_rows = store.neuron_rows[0].data();
    sparse_ffn(args, serial());
    wanted.push_back(in.back().y);
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 20; ++round) {
        FfnArgs args = arguments(store.layers[0], &in[static_cast<std::size_t>(i)], 1, true);
        const std::string wrong = (i < 3 ? shared : own)->ffn(0, Predictor(), args, serial());
        PI2_CHECK(wrong.empty() && in[static_cast<std::size_t>(i)].y == wanted[static_cast<std::size_t>(i)],
                  "thread %d: %s", i, wrong.c_str());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return 80;
}

long check_fork(std::mt19937& rng) {
  const StoreFixture store(rng, 1, 64, 2, 32, DType::kF32);
  std::unique_ptr<Offload> offload = opened(store, OffloadOptions());
  Inputs in = inputs(rng, store.layers[0], 1, 2);
  FfnArgs args = arguments(store.layers[0], &in, 1, true);
  const pid_t child = fork();
  if (child == 0) {
    const bool refused =
        offload->ffn(0, Predictor(), args, serial()).find("in another process (fork)") != std::string::npos &&
        offload->preload().find("in another process (fork)") != std::string::npos;
    const bool quiet = offload->stats(true).calls == 0;
    offload.reset();  // must neither wait for threads that are not there nor crash
    _exit(refused && quiet ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  PI2_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child");
  PI2_CHECK(offload->ffn(0, Predictor(), args, serial()).empty(), "its parent");
  return 2;
}

long check_options(std::mt19937& rng) {
  const StoreFixture store(rng, 1, 64, 2, 32, DType::kF32);
  std::string problem;
  OffloadOptions options;
  options.engine = "tape";
  PI2_CHECK(Offload::open(store.path, options, &problem) == nullptr &&
                problem == "engine: expected io_uring, pread or mmap, found 'tape'",
            "%s", problem.c_str());
  options = OffloadOptions();
  options.policy = "clock";
  PI2_CHECK(Offload::open(store.path, options, &problem) == nullptr &&
                problem == "policy: expected lru, sieve, s3-fifo, lfu, static or none, found 'clock'",
            "%s", problem.c_str());
  options = OffloadOptions();
  options.cache_bytes = -1;
  PI2_CHECK(Offload::open(store.path, options, &problem) == nullptr && problem.find("options: expected") == 0, "%s",
            problem.c_str());
  options.cache_bytes = 0;
  options.hot_share = 1.5;
  PI2_CHECK(Offload::open(store.path, options, &problem) == nullptr && problem.find("a hot share of 0 to 1") > 0, "%s",
            problem.c_str());
  return 4;
}

}  // namespace

int main() {
  std::mt19937 rng(9);
  long cases = check_options(rng);
  cases += check_bits(rng, 150, 3, 96, DType::kQ4, 10);
  cases += check_bits(rng, 70, 2, 33, DType::kF32, 0);
  cases += check_bits(rng, 300, 3, 64, DType::kBF16, 300);
  cases += check_bits(rng, 300, 3, 64, DType::kQ4, 0, 8);
  cases += check_bits(rng, 70, 2, 33, DType::kF32, 3, 64);
  const DType int4 = DType::kQ4, int8 = DType::kQ8;
  cases += check_bits(rng, 70, 3, 256, DType::kQ4K, 5, 1, &int8);
  cases += check_bits(rng, 75, 3, 256, DType::kQ6K, 0, 8, &int8);
  cases += check_bits(rng, 70, 2, 96, DType::kQ5_0, 0, 1, &int4);
  cases += check_bits(rng, 75, 3, 100, DType::kQ4, 5, 4, &int8);
  cases += check_bits(rng, 150, 3, 96, DType::kQ4, 10, 1, nullptr, true);
  cases += check_bits(rng, 70, 2, 33, DType::kF32, 0, 1, nullptr, true);
  cases += check_bits(rng, 70, 3, 256, DType::kQ4K, 5, 1, &int8, true);
  cases += check_margin(rng, 0, 1) + check_margin(rng, 20, 4) + check_margin_of_several(rng) +
           check_margin_of_a_long_prompt(rng);
  cases += check_ahead(rng);
  cases += check_ahead_and_resize(rng);
  cases += check_faults(rng);
  cases += check_prefetch(rng);
  cases += check_preload(rng);
  cases += check_company(rng);
  cases += check_fork(rng);
  return finish("test_offload", cases);
}
