// The next token of a sequence.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace pi2::runner {

class Sampler {
 public:
  // temperature 0: greedy. top_p: drawn from the most probable tokens that make up this much.
  Sampler(double temperature, double top_p, std::uint64_t seed)
      : temperature_(temperature), top_p_(top_p), random_(seed) {}

  // Of equals the first. Throws Problem: a logit is not finite.
  std::int64_t choose(const float* logits, std::int64_t vocab);

 private:
  // Leaves the tokens with the largest shares in order_, as few as make up this much; returns their sum.
  double keep_first(double wanted);

  double temperature_, top_p_;
  std::mt19937_64 random_;
  std::vector<double> shares_;
  std::vector<std::int64_t> order_;
};

}  // namespace pi2::runner
