// Ends text before the first complete stop string.
#pragma once

#include <string>
#include <vector>

namespace pi2::runner {

class Stops {
 public:
  explicit Stops(const std::vector<std::string>& strings) : strings_(&strings) {}

  // Returns the part of the text so far that cannot belong to a stop string; nothing after a stop string.
  std::string add(const std::string& piece);
  std::string rest();  // at the end: the text held back
  bool reached() const { return reached_; }

 private:
  const std::vector<std::string>* strings_;
  std::string held_;
  bool reached_ = false;
};

}  // namespace pi2::runner
