// Computes when a described storage device would finish its reads (docs/DEVICES.md). Pure arithmetic in seconds,
// without clock or threads, so that it can be tested and used by a planner.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace pi2 {

// Seconds that a command occupies the device, from bandwidths measured over blocks, ranges and depths.
class ServiceTable {
 public:
  // Parses numbers from `at` on; returns "" or an error message.
  std::string parse(const std::vector<double>& numbers, std::size_t* at, double latency, double core_cost,
                    std::int64_t max_depth);

  double seconds(double bytes, double range, double depth) const;

 private:
  std::vector<double> axes_[3];   // logarithms of blocks (bytes), ranges (bytes), depths (commands)
  std::vector<double> log_time_;  // [blocks][ranges][depths]
};

// One queue and one server. Commands enter in order, at most max_depth at a time. Each waits at least `latency`, in
// parallel with others, and then occupies the device alone for its service time.
class DeviceModel {
 public:
  // A flat list in SI units: latency, max_depth, extra cost of a command on the issuing core, and two tables, for
  // random and sequential reads. A table: numbers of blocks, ranges and depths; these blocks, ranges and depths,
  // ascending; bytes per second [blocks][ranges][depths]. Returns "" or an error message.
  static std::string parse(const std::vector<double>& numbers, DeviceModel* model);

  // The range of bytes that reads are spread over (default 1: the first range of the table).
  void set_range(std::int64_t bytes) { range_ = bytes > 1 ? static_cast<double>(bytes) : 1.0; }

  // A read is submitted at time `now` (never decreasing); returns when it ends. A read that begins where the last one
  // ended is sequential.
  double finish(double now, std::int64_t offset, std::int64_t bytes);

 private:
  double latency_ = 0, range_ = 1;
  std::size_t max_depth_ = 1;
  ServiceTable random_, sequential_;
  std::deque<double> ends_;  // end times of the commands at the device, ascending
  double free_ = 0;
  std::int64_t next_offset_ = -1;
};

// End times of reads, if `depth` of them are submitted at time 0 and a further one whenever one ends.
std::vector<double> closed_loop(DeviceModel model, std::int64_t depth, const std::vector<std::int64_t>& offsets,
                                const std::vector<std::int64_t>& bytes);

}  // namespace pi2
