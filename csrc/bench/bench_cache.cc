// What the cache's bookkeeping costs with each policy: time per neuron that is looked up, when all of them are
// there and when half of them are not. Sizes of a 7B model: 32 layers of 14336 neurons, half of them in memory.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <random>
#include <vector>

#include "cache/neuron_cache.h"

namespace {

using namespace pi2;

constexpr std::int64_t kLayers = 32, kNeurons = 14336, kSlots = kLayers * kNeurons / 2, kWanted = 4800, kTokens = 8;
constexpr std::int64_t kAhead = 16;  // as in offload.cc

// [tokens * layers][wanted]: neurons, ascending, of the first `among` of each layer.
std::vector<std::vector<std::int64_t>> traffic(std::int64_t among) {
  std::mt19937 rng(1);
  std::vector<std::vector<std::int64_t>> all;
  for (std::int64_t call = 0; call < kTokens * kLayers; ++call) {
    std::vector<std::int64_t> keys(static_cast<std::size_t>(among));
    for (std::int64_t i = 0; i < among; ++i) keys[static_cast<std::size_t>(i)] = call % kLayers * kNeurons + i;
    std::shuffle(keys.begin(), keys.end(), rng);
    keys.resize(kWanted);
    std::sort(keys.begin(), keys.end());
    all.push_back(keys);
  }
  return all;
}

void call(NeuronCache* cache, const std::vector<std::int64_t>& keys, std::vector<std::int64_t>* missing) {
  cache->begin();
  missing->clear();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) cache->expect(keys[i + kAhead]);
    if (cache->look_up(keys[i]) < 0) missing->push_back(keys[i]);
  }
  for (const std::int64_t key : *missing) cache->insert(key);
}

void look_ups(benchmark::State& state, CachePolicy policy, std::int64_t among) {
  const std::vector<std::vector<std::int64_t>> all = traffic(among);
  NeuronCache cache(kLayers * kNeurons, kSlots, policy);
  std::vector<std::int64_t> missing;
  std::int64_t looked_up = 0;
  for (const auto& keys : all) call(&cache, keys, &missing);
  for (auto _ : state) {
    for (const auto& keys : all) call(&cache, keys, &missing);
    looked_up += static_cast<std::int64_t>(all.size()) * kWanted;
  }
  state.counters["per_look_up"] =
      benchmark::Counter(static_cast<double>(looked_up), benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

}  // namespace

int main(int argc, char** argv) {
  for (const CachePolicy policy : kCachePolicies) {
    const std::string name = name_of(policy);
    benchmark::RegisterBenchmark(("cache/" + name + "/hits").c_str(), look_ups, policy, kNeurons / 2);
    benchmark::RegisterBenchmark(("cache/" + name + "/misses").c_str(), look_ups, policy, kNeurons);
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
