// Calls of a small store's layers beside what they give in memory, and replays of them.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "pi2/offload.h"
#include "pi2/replay.h"
#include "pi2/thread_pool.h"
#include "tests/store_fixture.h"

namespace pi2_test {

using namespace pi2;

// One call of a layer, and what it gives in memory.
struct Case {
  std::int64_t layer = 0, tokens = 1;
  std::vector<float> x, y, wanted;
  std::vector<std::uint8_t> active;

  Case(std::mt19937& rng, const StoreFixture& store, std::int64_t its_layer, std::int64_t n_tokens, unsigned one_in)
      : layer(its_layer), tokens(n_tokens) {
    const StoreLayer& l = store.layers[static_cast<std::size_t>(layer)];
    x = floats(rng, tokens * l.hidden);
    y.assign(x.size(), -1.0f);
    const auto cold = static_cast<unsigned>(l.neurons - l.n_hot);
    for (std::int64_t t = 0; t < tokens; ++t)  // skewed: the first neurons are wanted more often
      for (unsigned i = 0; i < cold; ++i) active.push_back(rng() % one_in == 0 && rng() % cold >= i);
    FfnArgs args = arguments(store);
    args.neuron_rows = store.neuron_rows[static_cast<std::size_t>(layer)].data();
    sparse_ffn(args, serial());
    wanted = y;
  }

  FfnArgs arguments(const StoreFixture& store) {
    const StoreLayer& l = store.layers[static_cast<std::size_t>(layer)];
    FfnArgs args;
    args.x = x.data();
    args.y = y.data();
    args.tokens = tokens;
    args.hidden = l.hidden;
    args.neurons = l.neurons;
    args.rows = l.rows;
    args.w_dtype = l.w_dtype;
    args.n_hot = l.n_hot;
    args.active = active.data();
    return args;
  }

  std::string run(Offload* offload, const StoreFixture& store, int threads = 1) {
    std::fill(y.begin(), y.end(), -1.0f);
    ThreadPool pool(threads);
    const std::string wrong = offload->ffn(layer, Predictor(), arguments(store), pool.parallel());
    return !wrong.empty() || y == wanted ? wrong : "other bits";
  }
};

// With a read per slot, so that more may be under way; null if there is no such engine here.
inline std::unique_ptr<Offload> opened(const StoreFixture& store, OffloadOptions options, std::int64_t run_bytes = 1) {
  options.run_bytes = run_bytes;
  std::string problem;
  std::unique_ptr<Offload> offload = Offload::open(store.path, options, &problem);
  if (problem.find("io_uring is not available") != std::string::npos) return nullptr;
  PI2_CHECK(offload != nullptr, "%s", problem.c_str());
  return offload;
}

inline std::int64_t place_bytes(const StoreFixture& store, bool direct) {
  const StoreLayer& l = store.layers[0];
  const std::int64_t unit = direct ? 512 : 64;
  return (l.cluster * l.neuron_bytes() + unit - 1) / unit * unit;
}

inline AccessView view(const Accesses& a) {
  return {a.layers.data(), a.streamed.data(), static_cast<std::int64_t>(a.layers.size()), a.bits.data(),
          static_cast<std::int64_t>(a.bits.size())};
}

inline ReplayCounts sum(const std::vector<ReplayCounts>& counts) {
  ReplayCounts all;
  for (const ReplayCounts& n : counts) {
    all.wanted += n.wanted;
    all.hits += n.hits;
    all.missed += n.missed;
  }
  return all;
}

// Of this process.
inline std::int64_t resident_bytes() {
  long pages = 0, rss = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  PI2_CHECK(file != nullptr && std::fscanf(file, "%ld %ld", &pages, &rss) == 2, "statm");
  if (file != nullptr) std::fclose(file);
  return rss * sysconf(_SC_PAGESIZE);
}

}  // namespace pi2_test
