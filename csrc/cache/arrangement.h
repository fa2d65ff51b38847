// Which slots of the file stay in a cache whatever its policy says, and the way there from those that are fixed now: in
// pieces, so that calls get in between. Pure bookkeeping: no cache, no bytes, no threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace pi2 {

class Arrangement {
 public:
  // Slots of the file of a layer. Release: those that are not to be fixed any more; else they are to be there, and
  // fixed.
  struct Piece {
    std::int64_t layer = 0, first = 0, last = 0;
    bool release = false;
  };

  // Of a store with so many slots in each layer. Pieces have at most `step` slots: neighbours, which are read together.
  void set_up(std::vector<std::int64_t> slots, std::int64_t step) {
    slots_ = std::move(slots);
    step_ = std::max<std::int64_t>(1, step);
    begin_.assign(slots_.size(), 0);
    count_.assign(slots_.size(), 0);
    fixed_before_.assign(slots_.size(), 0);
  }

  // From now on of each layer count[l] slots from begin[l] on are to be fixed, and no others. What was under way to
  // another arrangement goes on to this one.
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

  // Somebody else has fixed slots of a layer, all before this one.
  void may_be_fixed(std::size_t layer, std::int64_t last) {
    fixed_before_[layer] = std::max(fixed_before_[layer], std::min(last, slots_[layer]));
  }

  bool holds(std::int64_t layer, std::int64_t slot) const {
    const auto l = static_cast<std::size_t>(layer);
    return slot >= begin_[l] && slot < begin_[l] + count_[l];
  }

  // The next piece; false if there is none: then all is as it is to be.
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

  // The slots of the piece before `until` are as they are to be. If some are left, the next piece begins with them.
  void done(const Piece& piece, std::int64_t until) {
    offset_ += until - piece.first;
    if (!piece.release) left_ -= until - piece.first;
    if (until == piece.last) turn_to_next();
  }

  bool pending() const { return pending_; }
  // Slots to be fixed that no piece has had yet.
  std::int64_t left() const { return left_; }
  const std::vector<std::int64_t>& counts() const { return count_; }

 private:
  // The same ranks of the next layer, or after the last other ranks. What is rarest is released first, one by one in an
  // order that is that of filling() from its end, so that it is the first to leave; it is fixed last.
  void turn_to_next() {
    offset_ = 0;
    if (++layer_ < static_cast<std::int64_t>(slots_.size())) return;
    layer_ = 0;
    rank_ += release_ ? -1 : step_;
    if (release_ && rank_ < lowest()) return begin_to_fix();
    if (!release_) pending_ = rank_ < *std::max_element(count_.begin(), count_.end());
  }

  // Before this rank nothing is to be released.
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
  std::vector<std::int64_t> fixed_before_;           // by layer: no slot from this one on is fixed
  std::int64_t step_ = 1, layer_ = 0, rank_ = 0, offset_ = 0, left_ = 0;
  bool release_ = false, pending_ = false;
};

}  // namespace pi2
