// When a described storage device would have finished its reads (docs/DEVICES.md). Pure arithmetic in seconds: no clock
// and no threads, so that it can be tested, and asked by a planner.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace pi2 {

// Seconds that a command occupies the device, from bandwidths measured over blocks, ranges and depths.
class ServiceTable {
 public:
  // Takes its numbers from `at` on; "" or what is wrong.
  std::string parse(const std::vector<double>& numbers, std::size_t* at, double latency, double core_cost,
                    std::int64_t max_depth);

  double seconds(double bytes, double range, double depth) const;

 private:
  std::vector<double> axes_[3];   // logarithms of blocks (bytes), ranges (bytes), depths (commands)
  std::vector<double> log_time_;  // [blocks][ranges][depths]
};

// One queue and one server: commands enter in order, at most max_depth at a time; each is worked on `latency` after it
// entered at the earliest, beside the others, and then occupies the device for its time, alone.
class DeviceModel {
 public:
  // A flat list, in SI units: latency, max_depth, what each command costs more on the issuing core, and two tables, of
  // random reads and of sequential ones: numbers of blocks, ranges and depths, those blocks, ranges and depths,
  // ascending, and bytes per second [blocks][ranges][depths]. Returns "" or what is wrong.
  static std::string parse(const std::vector<double>& numbers, DeviceModel* model);

  // Reads spread over so many bytes (1 by default: the first range of the table).
  void set_range(std::int64_t bytes) { range_ = bytes > 1 ? static_cast<double>(bytes) : 1.0; }

  // A read is asked for at time `now`, which never goes back; returns when it is over. A read that begins where the one
  // before it ends is sequential.
  double finish(double now, std::int64_t offset, std::int64_t bytes);

 private:
  double latency_ = 0, range_ = 1;
  std::size_t max_depth_ = 1;
  ServiceTable random_, sequential_;
  std::deque<double> ends_;  // of the commands at the device, ascending; the last is when it is free
  double free_ = 0;
  std::int64_t next_offset_ = -1;
};

// Times at which reads are over, if `depth` of them are asked for at time 0 and another whenever one is over.
std::vector<double> closed_loop(DeviceModel model, std::int64_t depth, const std::vector<std::int64_t>& offsets,
                                const std::vector<std::int64_t>& bytes);

}  // namespace pi2
