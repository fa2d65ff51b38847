// A small store and its work, for tests in which what they ask of the system fails.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "pi2/offload.h"
#include "tests/store_fixture.h"

namespace pi2_test {

using namespace pi2;

inline constexpr std::int64_t kNeurons = 150, kHidden = 96;
inline constexpr long kAll = 1L << 40;  // events: this one and the rest

// A layer's input, and what it computes in memory. Every third neuron fires, and the first are neighbours.
struct Work {
  std::int64_t layer, tokens;
  std::vector<float> x, y, wanted;
  std::vector<std::uint8_t> active;
  bool whole;  // every neuron, of inputs rounded to int8: a prompt's matrix products, where there are some

  Work(std::mt19937& rng, const StoreFixture& store, std::int64_t of_layer, std::int64_t of_tokens, bool of_all = false)
      : layer(of_layer), tokens(of_tokens), x(floats(rng, of_tokens * kHidden)), y(x.size()), whole(of_all) {
    for (std::int64_t i = 0; i < tokens * kNeurons; ++i)
      active.push_back(i % kNeurons < 20 || rng() % static_cast<unsigned>(3 * tokens) == 0);
    FfnArgs args = arguments();
    args.neuron_rows = store.neuron_rows[static_cast<std::size_t>(layer)].data();
    sparse_ffn(args, serial());
    wanted = y;
  }

  FfnArgs arguments() {
    FfnArgs args;
    args.x = x.data();
    args.y = y.data();
    args.tokens = tokens;
    args.hidden = kHidden;
    args.neurons = kNeurons;
    args.w_dtype = DType::kQ4;
    args.active = whole ? nullptr : active.data();
    args.int8_activations = whole;
    return args;
  }

  std::string run(Offload* offload, const ParallelFor& parallel) {
    std::fill(y.begin(), y.end(), -1.0f);
    return offload->ffn(layer, Predictor(), arguments(), parallel);
  }

  bool same() const { return std::memcmp(wanted.data(), y.data(), y.size() * sizeof(float)) == 0; }
};

inline StoreFixture store_of(std::mt19937& rng) { return StoreFixture(rng, 2, kNeurons, 3, kHidden, DType::kQ4); }

inline std::unique_ptr<Offload> opened(const StoreFixture& store, const OffloadOptions& options) {
  std::string problem;
  std::unique_ptr<Offload> offload = Offload::open(store.path, options, &problem);
  PI2_CHECK(offload != nullptr || problem.find("io_uring is not available") != std::string::npos, "%s",
            problem.c_str());
  return offload;
}

}  // namespace pi2_test
