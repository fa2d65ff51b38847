#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "problem.h"

namespace pi2::runner {

std::int64_t Sampler::choose(const float* logits, std::int64_t vocab) {
  if (!std::all_of(logits, logits + vocab, [](float value) { return std::isfinite(value); })) {
    throw Problem("logits", "finite numbers", "NaN or infinity", "Check the model in PyTorch, then export it again.");
  }
  const float* best = std::max_element(logits, logits + vocab);
  if (temperature_ == 0) return best - logits;
  shares_.resize(static_cast<std::size_t>(vocab));
  double sum = 0;
  for (std::int64_t i = 0; i < vocab; ++i) {
    sum += shares_[i] = std::exp((static_cast<double>(logits[i]) - *best) / temperature_);
  }
  order_.resize(shares_.size());
  std::iota(order_.begin(), order_.end(), 0);
  double most = sum;
  if (top_p_ < 1) {
    // All with smaller shares together have less than 1 - top_p of the sum: none of them is among the first.
    const double least = (1 - top_p_) * sum / static_cast<double>(vocab);
    std::erase_if(order_, [&](std::int64_t token) { return shares_[token] < least; });
    most = keep_first(top_p_ * sum);
    if (most < top_p_ * sum) {  // sums were rounded down
      order_.resize(shares_.size());
      std::iota(order_.begin(), order_.end(), 0);
      most = keep_first(top_p_ * sum);
    }
  }
  // 53 bits, as many as a double has: the same draw with every standard library.
  double draw = static_cast<double>(random_() >> 11) * 0x1p-53 * most;
  for (const std::int64_t token : order_) {
    draw -= shares_[token];
    if (draw < 0) return token;
  }
  return order_.back();
}

double Sampler::keep_first(double wanted) {
  std::stable_sort(order_.begin(), order_.end(), [&](auto a, auto b) { return shares_[a] > shares_[b]; });
  double sum = 0;
  std::size_t count = 0;
  while (count < order_.size() && sum < wanted) sum += shares_[order_[count++]];
  order_.resize(count);
  return sum;
}

}  // namespace pi2::runner
