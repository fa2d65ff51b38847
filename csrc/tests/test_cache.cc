// The cache's bookkeeping: small cases by hand, and random traces of every policy (cache/policies/list.inc) against
// what holds for all of them and, for each, a plain model that says which key leaves.
#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "cache/neuron_cache.h"
#include "tests/check.h"

namespace {

using namespace pi2;

bool evicts(CachePolicy policy) { return policy != CachePolicy::kStatic && policy != CachePolicy::kNone; }

long by_hand() {
  NeuronCache lru(10, 3, CachePolicy::kLru);
  for (int key : {1, 2, 3}) {
    lru.begin();
    PI2_CHECK(lru.look_up(key) == -1 && lru.insert(key) >= 0, "key %d", key);
  }
  lru.begin();
  PI2_CHECK(lru.look_up(1) >= 0, "1 is there");
  PI2_CHECK(lru.insert(4) >= 0 && !lru.contains(2) && lru.contains(1) && lru.contains(3), "2 was the oldest");
  PI2_CHECK(lru.insert(5) >= 0 && !lru.contains(3), "3 was the next");
  PI2_CHECK(lru.insert(6) == -1 && lru.used() == 3 && lru.evictions() == 2, "all are pinned");
  lru.erase(4);
  PI2_CHECK(lru.insert(6) >= 0 && lru.used() == 3, "a slot that was given back");

  NeuronCache sieve(10, 3, CachePolicy::kSieve);
  for (int key : {1, 2, 3}) {
    sieve.begin();
    sieve.insert(key);
  }
  sieve.begin();
  sieve.look_up(1);  // visited: the hand passes it once
  sieve.begin();
  PI2_CHECK(sieve.insert(4) >= 0 && sieve.contains(1) && !sieve.contains(2), "1 was used, 2 not");

  NeuronCache fixed(10, 1, CachePolicy::kStatic);
  fixed.insert(7);
  fixed.begin();
  PI2_CHECK(fixed.insert(8) == -1 && fixed.contains(7), "what came first stays");

  NeuronCache none(10, 5, CachePolicy::kNone);
  PI2_CHECK(none.insert(1) == -1 && none.look_up(1) == -1 && none.slots() == 0, "no slots, whatever there is");
  PI2_CHECK(none.resize(7).empty() && none.slots() == 0, "nor later");

  NeuronCache window(10, 5, CachePolicy::kLru);
  for (int key : {1, 2, 8}) {
    window.begin();
    window.insert(key);
  }
  window.erase_older(0, 5, window.now() - 1);
  PI2_CHECK(!window.contains(1) && window.contains(2) && window.contains(8), "1 is older, 8 of another layer");
  CachePolicy policy;
  PI2_CHECK(policy_of("clock", &policy) == "expected lru, sieve, s3-fifo, lfu, static or none, found 'clock'",
            "a policy's name");
  for (const CachePolicy each : kCachePolicies)
    PI2_CHECK(policy_of(name_of(each), &policy).empty() && policy == each, "%s", name_of(each).c_str());
  return 12;
}

// What was used often, if longer ago, outlives what was used once; in the end it does not.
long frequency() {
  NeuronCache lfu(10, 2, CachePolicy::kLfu);
  const auto use = [&](std::int64_t key) {
    lfu.begin();
    if (lfu.look_up(key) < 0) lfu.insert(key);
  };
  for (int i = 0; i < 5; ++i) use(1);
  for (const int key : {2, 3, 4}) use(key);
  PI2_CHECK(lfu.contains(1) && lfu.contains(4) && !lfu.contains(2), "1 was used more often than 2, 3 and 4");
  use(3);
  use(4);
  PI2_CHECK(lfu.contains(1) && lfu.contains(4), "counts outlive a stay");
  for (int i = 0; i < 60; ++i) use(5 + i % 2);
  PI2_CHECK(!lfu.contains(1) && lfu.contains(5) && lfu.contains(6), "what was frequent long ago leaves");
  return 3;
}

// What comes back soon after it was evicted goes where a scan does not evict it.
long ghosts() {
  NeuronCache cache(1000, 20, CachePolicy::kS3Fifo);
  const auto use = [&](std::int64_t key) {
    cache.begin();
    if (cache.look_up(key) < 0) cache.insert(key);
  };
  for (std::int64_t key = 0; key < 25; ++key) use(key);
  PI2_CHECK(!cache.contains(0) && !cache.contains(4) && cache.contains(5), "first in, first out");
  for (std::int64_t key = 0; key < 5; ++key) use(key);
  for (std::int64_t key = 500; key < 600; ++key) use(key);
  for (std::int64_t key = 0; key < 5; ++key)
    PI2_CHECK(cache.contains(key), "%ld was remembered", static_cast<long>(key));
  PI2_CHECK(!cache.contains(24), "24 was not");
  return 7;
}

long fixed_stays(CachePolicy kind) {
  NeuronCache hot(20, 3, kind);
  if (hot.slots() == 0) return 0;
  hot.begin();
  PI2_CHECK(hot.insert(9, true) >= 0 && hot.is_fixed(9) && hot.fixed() == 1, "a fixed key");
  for (int key = 0; key < 8; ++key) {
    hot.begin();
    PI2_CHECK((hot.insert(key) >= 0 || !evicts(kind)) && hot.contains(9) && hot.used() <= 3, "key %d", key);
  }
  hot.erase_older(0, 20, hot.now() + 1);
  PI2_CHECK(hot.contains(9) && hot.used() == 1 && hot.look_up(9) >= 0, "what is fixed stays");
  hot.erase(9);
  hot.begin();
  PI2_CHECK(!hot.contains(9) && hot.insert(3) >= 0 && hot.insert(4) >= 0 && hot.insert(5) >= 0, "its slot is free");
  hot.begin();
  hot.fix(4, true);
  hot.fix(4, true);
  for (int key = 10; key < 19; ++key) {
    hot.begin();
    hot.insert(key);
  }
  PI2_CHECK(hot.contains(4) && hot.fixed() == 1, "fixed later");
  hot.fix(4, false);
  PI2_CHECK(hot.fixed() == 0 && hot.contains(4) && !hot.is_fixed(4), "and no longer");
  for (const std::int64_t slots : {1, 0}) hot.resize(slots);
  PI2_CHECK(hot.used() == 0 && hot.slots() == 0, "no room");
  return 14;
}

struct Traffic {
  std::mt19937 rng;
  std::int64_t keys;

  // As a layer asks for them: skewed.
  std::set<std::int64_t> call() {
    std::set<std::int64_t> wanted;
    const auto n = static_cast<unsigned>(keys);
    for (unsigned k = 0; k < 1 + rng() % 40; ++k) wanted.insert(static_cast<std::int64_t>(rng() % n * (rng() % n) / n));
    return wanted;
  }
};

// What is to be fixed is let in by every policy, also by one that evicts nothing for what is new.
long fixed_comes_in(CachePolicy kind) {
  NeuronCache cache(20, 3, kind);
  if (cache.slots() == 0) return 0;
  for (const int key : {1, 2, 3}) cache.insert(key);
  cache.begin();
  PI2_CHECK(cache.insert(4, true) >= 0 && cache.insert(5, true) >= 0 && cache.insert(6, true) >= 0, "three");
  PI2_CHECK(cache.insert(7, true) == -1, "all are fixed");
  cache.begin();
  PI2_CHECK(cache.insert(7, true) == -1 && cache.fixed() == 3 && cache.evictions() == 3, "and stay");
  return 3;
}

// A used cache that is renewed goes on as a new one into which the same keys were inserted.
long renewed(CachePolicy policy) {
  Traffic traffic{std::mt19937(6), 300};
  NeuronCache used(300, 40, policy), fresh(300, 40, policy);
  if (used.slots() == 0) return 0;
  for (int call = 0; call < 100; ++call) {
    used.begin();
    for (const std::int64_t key : traffic.call())
      if (used.look_up(key) < 0) used.insert(key, key % 50 == 0 && used.fixed() < 5);
  }
  std::vector<std::int64_t> keys;
  for (std::int64_t key = 300; key-- > 0;)
    if (used.contains(key)) keys.push_back(key);
  used.renew(keys);
  fresh.begin();
  for (const std::int64_t key : keys) fresh.insert(key, used.is_fixed(key));
  long hits = 0;
  for (int call = 0; call < 200; ++call) {
    const std::set<std::int64_t> wanted = traffic.call();
    for (NeuronCache* cache : {&used, &fresh}) cache->begin();
    for (const std::int64_t key : wanted) {
      const bool hit = fresh.look_up(key) >= 0;
      hits += hit;
      PI2_CHECK((used.look_up(key) >= 0) == hit, "%s, call %d", name_of(policy).c_str(), call);
    }
    for (const std::int64_t key : wanted)
      if (!fresh.contains(key))
        for (NeuronCache* cache : {&used, &fresh}) cache->insert(key);
  }
  PI2_CHECK(hits > 100 && used.fixed() == fresh.fixed() && used.fixed() > 0, "%ld hits", hits);
  return 1;
}

// With priorities the least of them leaves, among equals what was used the longest ago, whatever the policy is; and
// once they are forgotten, what the policy says.
long prioritised(CachePolicy policy) {
  Traffic traffic{std::mt19937(8), 300};
  NeuronCache cache(300, 40, policy);
  if (cache.slots() == 0) return 0;
  std::vector<float> value(300, 0);
  std::map<std::int64_t, long> last;  // call of the last use, of what is there
  const auto rank = [&](std::int64_t key) { return std::make_pair(value[static_cast<std::size_t>(key)], last[key]); };
  long evicted = 0;
  for (long call = 1; call < 400; ++call) {
    if (call % 5 == 1) {
      std::vector<float> some(100);
      for (float& one : some) one = static_cast<float>(traffic.rng() % 4);
      const auto first = static_cast<std::int64_t>(traffic.rng() % 201);
      std::copy(some.begin(), some.end(), value.begin() + first);
      cache.prioritise(first, some);
    }
    cache.begin();
    const std::set<std::int64_t> wanted = traffic.call();
    for (const std::int64_t key : wanted)
      if (cache.look_up(key) >= 0) last[key] = call;
    for (const std::int64_t key : wanted) {
      if (cache.contains(key)) continue;
      std::int64_t least = -1, left = -1;
      for (const auto& [other, time] : last)
        if (cache.used() == cache.slots() && time != call && (least < 0 || rank(other) < rank(least))) least = other;
      const bool came = cache.insert(key) >= 0;
      for (const auto& [other, time] : last)
        if (!cache.contains(other)) left = other;
      PI2_CHECK((left < 0) == (least < 0) && (left < 0 || rank(left) == rank(least)), "%s, call %ld: %ld left, not %ld",
                name_of(policy).c_str(), call, static_cast<long>(left), static_cast<long>(least));
      if (left >= 0) last.erase(left);
      if (came) last[key] = call;
      evicted += left >= 0;
    }
  }
  PI2_CHECK(evicted > 500, "%ld were evicted", evicted);
  cache.resize(15);
  auto least = std::make_pair(9.0F, 0L), most = std::make_pair(-1.0F, 0L);
  for (const auto& [key, time] : last)
    (cache.contains(key) ? least : most) = cache.contains(key) ? std::min(least, rank(key)) : std::max(most, rank(key));
  PI2_CHECK(cache.used() == 15 && least >= most, "the least leave a smaller cache");
  cache.forget_priorities();
  cache.begin();
  std::int64_t missing = 0;
  while (cache.contains(missing)) ++missing;
  PI2_CHECK((cache.insert(missing) >= 0) == evicts(policy), "the policy decides again");
  return evicted + 3;
}

// Which key a policy evicts, said as plainly as possible; asked with keys that may leave, and told what happens.
struct Model {
  virtual ~Model() = default;
  virtual void begin() {}
  virtual void used(std::int64_t key) = 0;
  virtual void inserted(std::int64_t key) = 0;
  virtual void erased(std::int64_t key) = 0;  // not to make room
  // -1: nothing. What is returned is gone.
  virtual std::int64_t evict(const std::function<bool(std::int64_t)>& may_leave) = 0;
};

using Queue = std::deque<std::int64_t>;  // newest first

void drop(Queue* queue, std::int64_t key) { queue->erase(std::find(queue->begin(), queue->end(), key)); }

struct LruModel final : Model {
  Queue order;
  void used(std::int64_t key) override {
    drop(&order, key);
    order.push_front(key);
  }
  void inserted(std::int64_t key) override { order.push_front(key); }
  void erased(std::int64_t key) override { drop(&order, key); }
  std::int64_t evict(const std::function<bool(std::int64_t)>& may_leave) override {
    const auto found = std::find_if(order.rbegin(), order.rend(), may_leave);
    if (found == order.rend()) return -1;
    const std::int64_t key = *found;
    drop(&order, key);
    return key;
  }
};

struct SieveModel final : Model {
  Queue order;
  std::set<std::int64_t> visited;
  std::int64_t hand = -1;  // key
  std::int64_t newer(std::int64_t key) const {
    const auto at = std::find(order.begin(), order.end(), key);
    return at == order.begin() ? -1 : *(at - 1);
  }
  void used(std::int64_t key) override { visited.insert(key); }
  void inserted(std::int64_t key) override { order.push_front(key); }
  void erased(std::int64_t key) override {
    if (hand == key) hand = newer(key);
    visited.erase(key);
    drop(&order, key);
  }
  std::int64_t evict(const std::function<bool(std::int64_t)>& may_leave) override {
    if (std::none_of(order.begin(), order.end(), may_leave)) return -1;
    for (;;) {
      if (hand < 0) hand = order.back();
      const std::int64_t key = hand;
      hand = newer(key);
      if (!may_leave(key)) continue;
      if (visited.erase(key) > 0) continue;
      drop(&order, key);
      return key;
    }
  }
};

struct S3FifoModel final : Model {
  Queue small, main;
  std::map<std::int64_t, int> uses;
  std::vector<std::int64_t> evicted;  // from the small queue, oldest first
  std::int64_t slots() const { return static_cast<std::int64_t>(small.size() + main.size()); }
  void used(std::int64_t key) override { uses[key] = std::min(3, uses[key] + 1); }
  void inserted(std::int64_t key) override {
    const auto last = std::find(evicted.rbegin(), evicted.rend(), key);
    const bool known = last != evicted.rend() && last - evicted.rbegin() < slots() * 9 / 10;
    std::replace(evicted.begin(), evicted.end(), key, std::int64_t{-1});
    uses[key] = 0;
    (known ? main : small).push_front(key);
  }
  void erased(std::int64_t key) override {
    drop(std::count(small.begin(), small.end(), key) > 0 ? &small : &main, key);
  }
  std::int64_t from_small(const std::function<bool(std::int64_t)>& may_leave) {
    for (std::size_t steps = small.size(); steps > 0; --steps) {
      const std::int64_t key = small.back();
      small.pop_back();
      if (!may_leave(key)) {
        small.push_front(key);
      } else if (uses[key] > 1) {
        uses[key] = 0;
        main.push_front(key);
      } else {
        evicted.push_back(key);
        return key;
      }
    }
    return -1;
  }
  std::int64_t from_main(const std::function<bool(std::int64_t)>& may_leave) {
    while (std::any_of(main.begin(), main.end(), may_leave)) {
      const std::int64_t key = main.back();
      main.pop_back();
      if (may_leave(key) && uses[key]-- == 0) return key;
      main.push_front(key);
    }
    return -1;
  }
  std::int64_t evict(const std::function<bool(std::int64_t)>& may_leave) override {
    const bool small_first = 10 * static_cast<std::int64_t>(small.size()) >= slots();
    // Where none may leave, order matters to nobody: it is not turned over and over.
    const auto first = [&] {
      return std::any_of(small.begin(), small.end(), may_leave) ? from_small(may_leave) : std::int64_t{-1};
    };
    std::int64_t key = small_first ? first() : from_main(may_leave);
    if (key < 0) key = small_first ? from_main(may_leave) : first();
    return key < 0 ? from_main(may_leave) : key;
  }
};

struct LfuModel final : Model {
  Queue order;  // by last use
  std::map<std::int64_t, int> counts;
  std::int64_t since = 0, keys;
  explicit LfuModel(std::int64_t n) : keys(n) {}
  void begin() override {
    if (since < std::max(4 * static_cast<std::int64_t>(order.size()), keys)) return;
    since = 0;
    // Of those that become equal, what was used less often leaves first.
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) { return counts[a] > counts[b]; });
    for (auto& [key, count] : counts) count /= 2;
  }
  void used(std::int64_t key) override {
    drop(&order, key);
    inserted(key);
  }
  void inserted(std::int64_t key) override {
    ++since;
    counts[key] = std::min(255, counts[key] + 1);
    order.push_front(key);
  }
  void erased(std::int64_t key) override { drop(&order, key); }
  std::int64_t evict(const std::function<bool(std::int64_t)>& may_leave) override {
    std::int64_t found = -1;
    for (auto key = order.rbegin(); key != order.rend(); ++key)
      if (may_leave(*key) && (found < 0 || counts[*key] < counts[found])) found = *key;
    if (found >= 0) drop(&order, found);
    return found;
  }
};

struct StaticModel final : Model {
  void used(std::int64_t) override {}
  void inserted(std::int64_t) override {}
  void erased(std::int64_t) override {}
  std::int64_t evict(const std::function<bool(std::int64_t)>&) override { return -1; }
};

std::unique_ptr<Model> model_of(CachePolicy policy, std::int64_t keys) {
  switch (policy) {
    case CachePolicy::kLru: return std::make_unique<LruModel>();
    case CachePolicy::kSieve: return std::make_unique<SieveModel>();
    case CachePolicy::kS3Fifo: return std::make_unique<S3FifoModel>();
    case CachePolicy::kLfu: return std::make_unique<LfuModel>(keys);
    case CachePolicy::kStatic:
    case CachePolicy::kNone: return std::make_unique<StaticModel>();
  }
  return nullptr;
}

// With some keys fixed, some held, some erased: what is there, and where, is what the model says.
long on_traces(CachePolicy policy, std::int64_t slots, unsigned seed) {
  constexpr std::int64_t kKeys = 300;
  Traffic traffic{std::mt19937(seed), kKeys};
  NeuronCache cache(kKeys, slots, policy);
  const std::unique_ptr<Model> model = model_of(policy, kKeys);
  PI2_CHECK(model != nullptr, "no model of policy %s: model_of makes them", name_of(policy).c_str());
  if (model == nullptr) return 1;
  slots = cache.slots();
  std::map<std::int64_t, std::int64_t> where;
  std::set<std::int64_t> fixed, held;
  for (std::int64_t key = 290; key < 290 + std::min<std::int64_t>(10, slots / 10); ++key) {
    where[key] = cache.insert(key, true);
    fixed.insert(key);
  }
  for (int round = 0; round < 600; ++round) {
    for (const std::int64_t key : held) cache.let_go(where[key]);
    held.clear();
    cache.begin();
    model->begin();
    for (const auto& [key, slot] : where) {
      if (traffic.rng() % 16 != 0) continue;
      cache.hold(slot);
      held.insert(key);
    }
    std::set<std::int64_t> pinned, missed;
    for (const std::int64_t key : traffic.call()) {
      const std::int64_t slot = cache.look_up(key);
      PI2_CHECK((slot >= 0) == (where.count(key) > 0), "%s, key %ld", name_of(policy).c_str(), static_cast<long>(key));
      if (slot < 0) {
        missed.insert(key);
        continue;
      }
      PI2_CHECK(where[key] == slot, "key %ld has moved", static_cast<long>(key));
      pinned.insert(key);
      if (fixed.count(key) == 0) model->used(key);
    }
    const auto may_leave = [&](std::int64_t key) { return pinned.count(key) == 0 && held.count(key) == 0; };
    for (const std::int64_t key : missed) {
      std::int64_t gone = -1;
      const bool full = static_cast<std::int64_t>(where.size()) == slots;
      if (full) gone = model->evict(may_leave);
      const std::int64_t slot = cache.insert(key);
      PI2_CHECK((slot >= 0) == (!full || gone >= 0), "%s: room for key %ld", name_of(policy).c_str(),
                static_cast<long>(key));
      if (slot < 0) {
        const bool none = std::none_of(where.begin(), where.end(), [&](const auto& each) {
          return may_leave(each.first) && fixed.count(each.first) == 0;
        });
        PI2_CHECK(!evicts(policy) || none, "%s: -1 with one that may leave", name_of(policy).c_str());
        continue;
      }
      if (gone >= 0) {
        PI2_CHECK(!cache.contains(gone) && where[gone] == slot, "%s: %ld was to leave, not another",
                  name_of(policy).c_str(), static_cast<long>(gone));
        where.erase(gone);
      }
      where[key] = slot;
      pinned.insert(key);
      model->inserted(key);
    }
    PI2_CHECK(cache.used() == static_cast<std::int64_t>(where.size()) && cache.used() <= slots, "%ld used",
              static_cast<long>(cache.used()));
    for (const std::int64_t key : fixed) PI2_CHECK(cache.contains(key), "fixed key %ld", static_cast<long>(key));
    for (const std::int64_t key : held) PI2_CHECK(cache.contains(key), "held key %ld", static_cast<long>(key));
    if (round % 50 == 49 && !where.empty() && fixed.count(where.begin()->first) == 0) {
      const std::int64_t key = where.begin()->first;
      cache.erase(key);
      where.erase(key);
      held.erase(key);
      model->erased(key);
    }
    if (pi2_test::failures() > 0) return round;
  }
  return 600;
}

// Smaller and larger between calls: every key that stays is where it is said to be, what is fixed is the last to leave,
// what leaves under LRU is what was used longest ago; and all goes on as with a cache of that size.
long resized(CachePolicy policy, unsigned seed) {
  constexpr std::int64_t kKeys = 300;
  Traffic traffic{std::mt19937(seed), kKeys};
  NeuronCache cache(kKeys, 100, policy);
  if (cache.slots() == 0) return 0;
  LruModel order;
  std::map<std::int64_t, std::int64_t> where;
  for (std::int64_t key = 280; key < 290; ++key) where[key] = cache.insert(key, true);
  for (const std::int64_t slots : {60, 61, 20, 20, 150, 300, 40, 5, 0, 80}) {
    for (int call = 0; call < 30; ++call) {
      cache.begin();
      std::vector<std::int64_t> missed;
      for (const std::int64_t key : traffic.call()) {
        if (cache.look_up(key) < 0) missed.push_back(key);
        if (cache.contains(key) && !cache.is_fixed(key)) order.used(key);
      }
      for (const std::int64_t key : missed) {
        if (cache.insert(key) < 0) continue;
        order.inserted(key);
        for (auto each = where.begin(); each != where.end();) {
          if (cache.contains(each->first)) {
            ++each;
            continue;
          }
          order.erased(each->first);
          each = where.erase(each);
        }
        where[key] = cache.slot_of(key);
      }
    }
    const std::int64_t fixed = cache.fixed();
    const std::vector<NeuronCache::Move> moves = cache.resize(slots);
    PI2_CHECK(cache.slots() == slots && cache.used() <= slots, "%ld slots", static_cast<long>(slots));
    PI2_CHECK(cache.fixed() == std::min(fixed, slots), "fixed keys are the last to leave");
    std::map<std::int64_t, std::int64_t> by_slot;
    for (const auto& [key, slot] : where) by_slot[slot] = key;
    for (const NeuronCache::Move& move : moves) {
      PI2_CHECK(move.from >= slots && move.to < slots, "from %d to %d", move.from, move.to);
      where[by_slot[move.from]] = move.to;
    }
    std::set<std::int64_t> taken;
    for (auto each = where.begin(); each != where.end();) {
      if (cache.contains(each->first)) {
        PI2_CHECK(cache.slot_of(each->first) == each->second && each->second < slots, "key %ld is elsewhere",
                  static_cast<long>(each->first));
        PI2_CHECK(taken.insert(each->second).second, "two keys in a slot");
        ++each;
        continue;
      }
      each = where.erase(each);
    }
    const auto there = [&](std::int64_t key) { return cache.contains(key); };
    if (policy == CachePolicy::kLru)
      PI2_CHECK(std::is_partitioned(order.order.begin(), order.order.end(), there), "an older one stayed");
    order.order.erase(
        std::remove_if(order.order.begin(), order.order.end(), [&](std::int64_t key) { return !there(key); }),
        order.order.end());
    if (pi2_test::failures() > 0) return 1;
  }
  return 10;
}

// A cache that was made smaller when it was empty is one that was made small.
long as_if_new(CachePolicy policy) {
  Traffic traffic{std::mt19937(5), 300};
  NeuronCache small(300, 30, policy), shrunk(300, 100, policy), grown(300, 3, policy);
  shrunk.resize(30);
  grown.resize(30);
  long hits = 0;
  for (int call = 0; call < 200; ++call) {
    const std::set<std::int64_t> wanted = traffic.call();
    for (NeuronCache* cache : {&small, &shrunk, &grown}) cache->begin();
    for (const std::int64_t key : wanted) {
      const bool hit = small.look_up(key) >= 0;
      hits += hit;
      PI2_CHECK((shrunk.look_up(key) >= 0) == hit && (grown.look_up(key) >= 0) == hit, "call %d", call);
    }
    for (const std::int64_t key : wanted)
      if (!small.contains(key))
        for (NeuronCache* cache : {&small, &shrunk, &grown}) cache->insert(key);
  }
  PI2_CHECK((hits > 100) == (small.slots() > 0), "%ld hits", hits);
  return 1;
}

}  // namespace

int main() {
  long cases = by_hand() + frequency() + ghosts();
  for (const CachePolicy policy : kCachePolicies) {
    cases += fixed_stays(policy) + fixed_comes_in(policy) + resized(policy, 4) + as_if_new(policy) + renewed(policy) +
             prioritised(policy);
    for (const std::int64_t slots : {0, 1, 7, 60, 300})
      for (const unsigned seed : {3u, 8u}) cases += on_traces(policy, slots, seed);
  }
  return pi2_test::finish("test_cache", cases);
}
