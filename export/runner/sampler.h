// Chooses the next token of a sequence.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

namespace pi2::runner {

// Sampling settings. Unset ones are those of the model's generation_config.json, or else have no effect.
struct Sampling {
  double temperature = 0;  // 0: greedy; only the penalty applies
  std::optional<double> top_p, min_p, repetition_penalty;
  std::optional<std::int64_t> top_k;

  Sampling or_as(const Sampling& other) const;
};

// Throws Problem for an invalid setting; `before` precedes its name.
void check(const Sampling& sampling, const std::string& before);

class Sampler {
 public:
  // Draws from the top_k most probable tokens (0: all), of these from the fewest that make up top_p, of these from
  // those with at least min_p times the probability of the first. repetition_penalty divides positive and multiplies
  // negative logits of earlier tokens (as in transformers). Draws depend on the seed alone.
  Sampler(const Sampling& sampling, std::uint64_t seed);

  // Records an earlier token, of the prompt or chosen.
  void add(std::int64_t token);
  // Among equals the first. Throws Problem if a logit is not finite.
  std::int64_t choose(const float* logits, std::int64_t vocab);

 private:
  // Keeps the fewest tokens with the largest shares in order_ that make up `wanted`, at most `most`; returns their sum.
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
