#include "io/device_model.h"

#include <algorithm>
#include <cmath>

namespace pi2 {
namespace {

constexpr double kMostSeconds = 1, kLeastBandwidth = 1e5, kMostBandwidth = 1e12, kMostDepth = 65536, kMostPoints = 64;

bool whole(double value, double least, double most) {
  return value >= least && value <= most && value == std::floor(value);
}

std::string found(double value) { return ", found " + std::to_string(value); }

// The position of `x` on an axis: between point `first` and the next one, at `share`; clamped to the ends.
struct Place {
  std::size_t first = 0;
  double share = 0;
};

Place place(const std::vector<double>& axis, double x) {
  Place p;
  if (axis.size() == 1 || x <= axis.front()) return p;
  p.first = axis.size() - 2;
  p.share = 1;
  if (x >= axis.back()) return p;
  p.first = static_cast<std::size_t>(std::upper_bound(axis.begin(), axis.end(), x) - axis.begin()) - 1;
  p.share = (x - axis[p.first]) / (axis[p.first + 1] - axis[p.first]);
  return p;
}

}  // namespace

std::string ServiceTable::parse(const std::vector<double>& numbers, std::size_t* at, double latency, double core_cost,
                                std::int64_t max_depth) {
  static const char* const kNames[] = {"blocks", "ranges", "depths"};
  if (numbers.size() - *at < 3) return "expected three sizes of axes, found the end of the list";
  std::size_t sizes[3], values = 1, points = 0;
  for (int k = 0; k < 3; ++k) {
    const double size = numbers[*at + static_cast<std::size_t>(k)];
    if (!whole(size, 1, kMostPoints)) return std::string(kNames[k]) + ": expected 1 to 64 of them" + found(size);
    sizes[k] = static_cast<std::size_t>(size);
    values *= sizes[k];
    points += sizes[k];
  }
  *at += 3;
  if (numbers.size() - *at < points + values)
    return "expected " + std::to_string(points + values) + " numbers, found " + std::to_string(numbers.size() - *at);
  std::vector<double> axes[3];
  for (int k = 0; k < 3; ++k) {
    double before = 0;
    for (std::size_t i = 0; i < sizes[k]; ++i) {
      const double value = numbers[(*at)++];
      if (!(value >= 1 && value > before))
        return std::string(kNames[k]) + ": expected 1 or more, ascending" + found(value);
      if (k == 2 && value > static_cast<double>(max_depth))
        return "depths: expected at most the device's " + std::to_string(max_depth) + found(value);
      axes[k].push_back(before = value);
      axes_[k].push_back(std::log(value));
    }
  }
  for (const double block : axes[0]) {
    for (std::size_t r = 0; r < sizes[1]; ++r) {
      for (const double depth : axes[2]) {
        const double bandwidth = numbers[(*at)++];
        if (!(bandwidth >= kLeastBandwidth && bandwidth <= kMostBandwidth))
          return "bandwidth: expected 100000 to 1e12 bytes/s" + found(bandwidth);
        // In a closed loop, commands of time t and latency L take max(depth * t, L + t) per round.
        const double turn = depth * block / bandwidth;
        const double time = turn - turn / depth >= latency ? turn / depth : turn - latency;
        if (time <= 0)
          return "latency: expected less than what a read of " + std::to_string(static_cast<std::int64_t>(block)) +
                 " bytes takes at depth " + std::to_string(static_cast<std::int64_t>(depth)) + ", " +
                 std::to_string(turn * 1e6) + " us" + found(latency * 1e6);
        log_time_.push_back(std::log(time + core_cost));
        const std::size_t row = sizes[1] * sizes[2];
        // With a tolerance for rounding: two blocks may take equally long.
        if (log_time_.size() > row && log_time_.back() < log_time_[log_time_.size() - 1 - row] - 1e-9)
          return "bandwidth: expected larger blocks to take longer, found " +
                 std::to_string(static_cast<std::int64_t>(block)) + " bytes quicker than a smaller block";
      }
    }
  }
  return "";
}

double ServiceTable::seconds(double bytes, double range, double depth) const {
  const double log_bytes = std::log(std::max(bytes, 1.0));
  const double at[3] = {log_bytes, std::log(range), std::log(depth)};
  Place places[3];
  for (int k = 0; k < 3; ++k) places[k] = place(axes_[k], at[k]);
  double log_time = 0;
  for (int corner = 0; corner < 8; ++corner) {
    double weight = 1;
    std::size_t index = 0;
    for (int k = 0; k < 3; ++k) {
      const bool next = (corner >> k & 1) != 0;
      weight *= next ? places[k].share : 1 - places[k].share;
      index = index * axes_[k].size() + places[k].first + (next ? 1 : 0);
    }
    if (weight > 0) log_time += weight * log_time_[index];
  }
  // Larger blocks have the bandwidth of the largest one; smaller blocks take as long as the smallest one.
  return std::exp(log_time + std::max(0.0, log_bytes - axes_[0].back()));
}

std::string DeviceModel::parse(const std::vector<double>& numbers, DeviceModel* model) {
  *model = DeviceModel();
  if (numbers.size() < 3) return "expected a latency, a depth and the cost of a core, found the end of the list";
  for (std::size_t i = 0; i < numbers.size(); ++i)
    if (!std::isfinite(numbers[i])) return "expected finite numbers, found another at position " + std::to_string(i);
  if (numbers[0] < 0 || numbers[0] > kMostSeconds) return "latency: expected 0 to 1 s" + found(numbers[0]);
  if (!whole(numbers[1], 1, kMostDepth)) return "max_depth: expected a whole number up to 65536" + found(numbers[1]);
  if (numbers[2] < 0 || numbers[2] > kMostSeconds) return "cost of the core: expected 0 to 1 s" + found(numbers[2]);
  model->latency_ = numbers[0];
  model->max_depth_ = static_cast<std::size_t>(numbers[1]);
  std::size_t at = 3;
  for (const bool random : {true, false}) {
    ServiceTable& table = random ? model->random_ : model->sequential_;
    const std::string wrong =
        table.parse(numbers, &at, numbers[0], numbers[2], static_cast<std::int64_t>(model->max_depth_));
    if (!wrong.empty()) return std::string(random ? "random" : "sequential") + ": " + wrong;
  }
  if (at != numbers.size())
    return "expected " + std::to_string(at) + " numbers, found " + std::to_string(numbers.size());
  return "";
}

double DeviceModel::finish(double now, std::int64_t offset, std::int64_t bytes) {
  double entered = now;
  if (ends_.size() == max_depth_) entered = std::max(now, ends_.front());  // there is room when the oldest has ended
  while (!ends_.empty() && ends_.front() <= entered) ends_.pop_front();
  const auto depth = static_cast<double>(ends_.size() + 1);
  const ServiceTable& table = offset == next_offset_ ? sequential_ : random_;
  free_ = std::max(entered + latency_, free_) + table.seconds(static_cast<double>(bytes), range_, depth);
  ends_.push_back(free_);
  next_offset_ = offset + bytes;
  return free_;
}

std::vector<double> closed_loop(DeviceModel model, std::int64_t depth, const std::vector<std::int64_t>& offsets,
                                const std::vector<std::int64_t>& bytes) {
  std::vector<double> ends;
  const auto first = static_cast<std::size_t>(std::max<std::int64_t>(depth, 1));
  for (std::size_t i = 0; i < std::min(offsets.size(), bytes.size()); ++i)
    ends.push_back(model.finish(i < first ? 0.0 : ends[i - first], offsets[i], bytes[i]));
  return ends;
}

}  // namespace pi2
