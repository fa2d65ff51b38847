// The steps from the slots of the file that are fixed in a cache now to those that shall be: small pieces, so that
// calls run in between. Pure bookkeeping: no cache, no bytes, no threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace pi2 {

class RebalancePlan {
 public:
  // Slots [first, last) of a layer. release: unfix them; else load what is missing and fix them.
  struct Piece {
    std::int64_t layer = 0, first = 0, last = 0;
    bool release = false;
  };

  // `slots`: of each layer of the store. A piece has at most `step` slots, neighbours that are read together.
  void set_up(std::vector<std::int64_t> slots, std::int64_t step) {
    slots_ = std::move(slots);
    step_ = std::max<std::int64_t>(1, step);
    begin_.assign(slots_.size(), 0);
    count_.assign(slots_.size(), 0);
    fixed_before_.assign(slots_.size(), 0);
  }

  // The new goal: of each layer the slots [begin[l], begin[l] + count[l]) are fixed, and no others. Replaces a goal
  // that has not been reached yet.
  void set(std::vector<std::int64_t> begin, std::vector<std::int64_t> count) {
    for (std::size_t l = 0; l < slots_.size(); ++l) may_be_fixed(l, begin_[l] + count_[l]);
    begin_ = std::move(begin);
    count_ = std::move(count);
    left_ = 0;
    std::int64_t highest = 0;
    for (std::size_t l = 0; l < slots_.size(); ++l) {
      left_ += count_[l];
      highest = std::max(highest, fixed_before_[l]);
    }
    release_ = true;
    layer_ = 0;
    rank_ = highest - 1;
    offset_ = 0;
    pending_ = true;
    if (rank_ < lowest()) begin_to_fix();
  }

  // Slots of a layer before `last` may have been fixed by other means (preload).
  void may_be_fixed(std::size_t layer, std::int64_t last) {
    fixed_before_[layer] = std::max(fixed_before_[layer], std::min(last, slots_[layer]));
  }

  bool holds(std::int64_t layer, std::int64_t slot) const {
    const auto l = static_cast<std::size_t>(layer);
    return slot >= begin_[l] && slot < begin_[l] + count_[l];
  }

  // The next piece; false if the goal is reached.
  bool next(Piece* piece) {
    while (pending_) {
      const auto l = static_cast<std::size_t>(layer_);
      piece->layer = layer_;
      piece->release = release_;
      piece->first = release_ ? rank_ : begin_[l] + rank_ + offset_;
      piece->last = release_ ? std::min(rank_ + 1, fixed_before_[l]) : begin_[l] + std::min(rank_ + step_, count_[l]);
      if (piece->first < piece->last && !(release_ && holds(layer_, rank_))) return true;
      turn_to_next();
    }
    return false;
  }

  // The slots of the piece before `until` are done. The next piece begins at `until`.
  void done(const Piece& piece, std::int64_t until) {
    offset_ += until - piece.first;
    if (!piece.release) left_ -= until - piece.first;
    if (until == piece.last) turn_to_next();
  }

  bool pending() const { return pending_; }
  // Slots still to be fixed.
  std::int64_t left() const { return left_; }
  const std::vector<std::int64_t>& counts() const { return count_; }

 private:
  // Goes on to the same ranks of the next layer, after the last layer to other ranks. Rare neurons are released first,
  // one by one in the reverse order of filling(), so that they are evicted first; they are fixed last.
  void turn_to_next() {
    offset_ = 0;
    if (++layer_ < static_cast<std::int64_t>(slots_.size())) return;
    layer_ = 0;
    rank_ += release_ ? -1 : step_;
    if (release_ && rank_ < lowest()) return begin_to_fix();
    if (!release_) pending_ = rank_ < *std::max_element(count_.begin(), count_.end());
  }

  // Nothing before this rank has to be released.
  std::int64_t lowest() const {
    std::int64_t rank = std::numeric_limits<std::int64_t>::max();
    for (std::size_t l = 0; l < slots_.size(); ++l) {
      if (begin_[l] > 0)
        rank = 0;
      else if (fixed_before_[l] > count_[l])
        rank = std::min(rank, count_[l]);
    }
    return rank;
  }

  void begin_to_fix() {
    for (std::size_t l = 0; l < slots_.size(); ++l) fixed_before_[l] = begin_[l] + count_[l];
    release_ = false;
    rank_ = 0;
    pending_ = left_ > 0;
  }

  std::vector<std::int64_t> slots_, begin_, count_;  // by layer
  std::vector<std::int64_t> fixed_before_;           // by layer: only slots before this one are fixed
  std::int64_t step_ = 1, layer_ = 0, rank_ = 0, offset_ = 0, left_ = 0;
  bool release_ = false, pending_ = false;
};

}  // namespace pi2
