// The next token of a sequence.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

namespace pi2::runner {

// How tokens are chosen. What is not said is as the model's generation_config.json has it, or else has no effect.
struct Sampling {
  double temperature = 0;  // 0: greedy, where only the penalty counts
  std::optional<double> top_p, min_p, repetition_penalty;
  std::optional<std::int64_t> top_k;

  Sampling or_as(const Sampling& other) const;
};

// Throws Problem: a setting makes no sense, whose name is behind `before`.
void check(const Sampling& sampling, const std::string& before);

class Sampler {
 public:
  // Drawn from the top_k most probable tokens (0: all), of these from those that make up top_p, of these from those
  // that have min_p times the probability of the first. repetition_penalty divides positive logits, and multiplies
  // negative ones, of tokens that were there before (as transformers has it). Draws depend on the seed alone.
  Sampler(const Sampling& sampling, std::uint64_t seed);

  // `token` was there before. Of the prompt, and of what was chosen.
  void add(std::int64_t token);
  // Of equals the first. Throws Problem: a logit is not finite.
  std::int64_t choose(const float* logits, std::int64_t vocab);

 private:
  // Leaves the tokens with the largest shares in order_, as few as make up this much, at most so many; returns their
  // sum.
  double keep_first(double wanted, std::size_t most);
  const float* penalised(const float* logits, std::int64_t vocab);

  double temperature_, top_p_, min_p_, penalty_;
  std::int64_t top_k_;
  std::mt19937_64 random_;
  std::unordered_set<std::int64_t> there_;
  std::vector<float> penalised_;
  std::vector<double> shares_;
  std::vector<std::int64_t> order_;
};

}  // namespace pi2::runner
