#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>

#include "problem.h"

namespace pi2::runner {

Sampling Sampling::or_as(const Sampling& other) const {
  const auto either = [](const auto& mine, const auto& theirs) { return mine ? mine : theirs; };
  return {temperature, either(top_p, other.top_p), either(min_p, other.min_p),
          either(repetition_penalty, other.repetition_penalty), either(top_k, other.top_k)};
}

void check(const Sampling& s, const std::string& before) {
  const auto require = [&](bool good, const char* name, const char* expected, double found) {
    if (good) return;
    char text[32];
    std::snprintf(text, sizeof text, "%.15g", found);
    throw Problem(before + name, expected, text, "Correct it.");
  };
  const double top_p = s.top_p.value_or(1), min_p = s.min_p.value_or(0), penalty = s.repetition_penalty.value_or(1);
  const std::int64_t top_k = s.top_k.value_or(0);
  require(s.temperature >= 0 && std::isfinite(s.temperature), "temperature", "0 (greedy) or more", s.temperature);
  require(top_p > 0 && top_p <= 1, "top_p", "more than 0, at most 1", top_p);
  require(min_p >= 0 && min_p <= 1, "min_p", "0 to 1", min_p);
  require(top_k >= 0, "top_k", "0 (all) or more", static_cast<double>(top_k));
  require(penalty >= 0.01 && penalty <= 100, "repetition_penalty", "0.01 to 100; 1 is none", penalty);
}

Sampler::Sampler(const Sampling& s, std::uint64_t seed)
    : temperature_(s.temperature),
      top_p_(s.top_p.value_or(1)),
      min_p_(s.min_p.value_or(0)),
      penalty_(s.repetition_penalty.value_or(1)),
      top_k_(s.top_k.value_or(0)),
      random_(seed) {}

void Sampler::add(std::int64_t token) {
  if (penalty_ != 1) there_.insert(token);
}

const float* Sampler::penalised(const float* logits, std::int64_t vocab) {
  if (there_.empty()) return logits;
  penalised_.assign(logits, logits + vocab);
  const auto penalty = static_cast<float>(penalty_);
  for (const std::int64_t token : there_) {
    float& logit = penalised_[static_cast<std::size_t>(token)];
    logit = logit < 0 ? logit * penalty : logit / penalty;
  }
  return penalised_.data();
}

std::int64_t Sampler::choose(const float* logits, std::int64_t vocab) {
  if (!std::all_of(logits, logits + vocab, [](float value) { return std::isfinite(value); })) {
    throw Problem("logits", "finite numbers", "NaN or infinity", "Check the model in PyTorch, then export it again.");
  }
  logits = penalised(logits, vocab);
  const float* best = std::max_element(logits, logits + vocab);
  if (temperature_ == 0) return best - logits;
  shares_.resize(static_cast<std::size_t>(vocab));
  double sum = 0;
  for (std::int64_t i = 0; i < vocab; ++i) {
    sum += shares_[i] = std::exp((static_cast<double>(logits[i]) - *best) / temperature_);
  }
  const auto take_all = [&] {
    order_.resize(shares_.size());
    std::iota(order_.begin(), order_.end(), 0);
  };
  take_all();
  double most = sum;
  if (top_k_ > 0 && top_k_ < vocab) {
    most = keep_first(std::numeric_limits<double>::infinity(), static_cast<std::size_t>(top_k_));
    if (top_p_ < 1) most = keep_first(top_p_ * most, order_.size());
  } else if (top_p_ < 1) {
    // Tokens with smaller shares have less than 1 - top_p of the sum together, so none of them is kept.
    const double least = (1 - top_p_) * sum / static_cast<double>(vocab);
    std::erase_if(order_, [&](std::int64_t token) { return shares_[token] < least; });
    most = keep_first(top_p_ * sum, order_.size());
    if (most < top_p_ * sum) {  // rounding made the sum too small
      take_all();
      most = keep_first(top_p_ * sum, order_.size());
    }
  }
  if (min_p_ > 0) {  // the most probable token has a share of 1
    std::erase_if(order_, [&](std::int64_t token) { return shares_[token] < min_p_; });
    most = 0;
    for (const std::int64_t token : order_) most += shares_[token];
  }
  // 53 bits, the precision of a double: the same draw with every standard library.
  double draw = static_cast<double>(random_() >> 11) * 0x1p-53 * most;
  for (const std::int64_t token : order_) {
    draw -= shares_[token];
    if (draw < 0) return token;
  }
  return order_.back();
}

double Sampler::keep_first(double wanted, std::size_t most) {
  const auto before = [&](std::int64_t a, std::int64_t b) {
    return shares_[a] > shares_[b] || (shares_[a] == shares_[b] && a < b);
  };
  const std::size_t sorted = std::min(most, order_.size());
  if (sorted == order_.size()) {
    std::sort(order_.begin(), order_.end(), before);
  } else {
    std::partial_sort(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(sorted), order_.end(), before);
  }
  double sum = 0;
  std::size_t count = 0;
  while (count < sorted && sum < wanted) sum += shares_[order_[count++]];
  order_.resize(count);
  return sum;
}

}  // namespace pi2::runner
