// Caches nothing: every call reads all neurons that it wants.
#include "cache/policies/policy.h"

namespace pi2 {
namespace {

class None final : public EvictionPolicy {
 public:
  std::int64_t room(std::int64_t) const override { return 0; }
  void used(std::int32_t) override {}
  void inserted(std::int32_t) override {}
  void erased(std::int32_t) override {}
  void moved(std::int32_t, std::int32_t) override {}
  std::int32_t victim(std::int64_t) override { return -1; }
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_none(CacheEntries&, std::int64_t) { return std::make_unique<None>(); }

}  // namespace pi2
