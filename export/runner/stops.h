// Text that ends before that of some strings which is whole first.
#pragma once

#include <string>
#include <vector>

namespace pi2::runner {

class Stops {
 public:
  explicit Stops(const std::vector<std::string>& strings) : strings_(&strings) {}

  // What of `piece`, and of what was held back before, is certain: no stop string begins in it. After one nothing is.
  std::string add(const std::string& piece);
  std::string rest();  // at the end: what was held back
  bool reached() const { return reached_; }

 private:
  const std::vector<std::string>* strings_;
  std::string held_;
  bool reached_ = false;
};

}  // namespace pi2::runner
