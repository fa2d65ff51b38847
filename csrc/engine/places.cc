#include "engine/places.h"

#include <algorithm>
#include <cstring>

#include "pi2/ffn.h"

namespace pi2 {

std::string Places::set_up(const Layout& layout, const OffloadOptions& options, CachePolicy policy) {
  if (layout.mapped() != nullptr) {
    cache_ = std::make_unique<NeuronCache>(layout.keys(), 0, policy);
    return "";
  }
  std::int64_t per_chunk = 0, per_prompt_chunk = 0;
  for (const StoreLayer& l : layout.layers()) {
    const auto slots = [&](std::int64_t neurons) { return (std::min(neurons, l.neurons) + l.cluster - 1) / l.cluster; };
    bytes_ = std::max(bytes_, rounded(layout.read_bytes(l), 64));
    per_chunk = std::max(per_chunk, slots(l.chunk > 0 ? l.chunk : chunk_neurons(l.neurons)));
    per_prompt_chunk = std::max(per_prompt_chunk, slots(kPromptNeurons));
  }
  // At least one chunk, so that the first waiting chunk always makes progress.
  n_spares_ = std::max(options.in_flight * per_chunk, per_prompt_chunk);
  const std::int64_t keys = layout.keys();
  cache_ = std::make_unique<NeuronCache>(keys, std::min(keys, options.cache_bytes / bytes_), policy);
  most_slots_ = cache_->slots();
  const std::int64_t n = most_slots_ + n_spares_;
  if (!memory_.allocate(n * bytes_, true)) return "no memory for a cache of " + std::to_string(n * bytes_) + " bytes";
  about_.assign(static_cast<std::size_t>(n), About{false, false, false, -1});
  for (std::int64_t p = n - 1; p >= most_slots_; --p) free_spares_.push_back(static_cast<std::int32_t>(p));
  return "";
}

void Places::resize(std::int64_t slots) {
  const std::int64_t before = cache_->slots();
  for (const NeuronCache::Move& move : cache_->resize(slots)) {
    std::memcpy(at(move.to), at(move.from), static_cast<std::size_t>(bytes_));
    about(move.to).guess = about(move.from).guess;
  }
  memory_.give_back(cache_->slots() * bytes_, before * bytes_);
}

}  // namespace pi2
