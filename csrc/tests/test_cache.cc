// The cache's bookkeeping: small cases by hand, and random traces against a plain model of each policy.
#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>

#include "core/neuron_cache.h"
#include "tests/check.h"

namespace {

using namespace pi2;

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

  NeuronCache none(10, 0, CachePolicy::kLru);
  PI2_CHECK(none.insert(1) == -1 && none.look_up(1) == -1, "no slots");

  NeuronCache window(10, 5, CachePolicy::kLru);
  for (int key : {1, 2, 8}) {
    window.begin();
    window.insert(key);
  }
  window.erase_older(0, 5, window.now() - 1);
  PI2_CHECK(!window.contains(1) && window.contains(2) && window.contains(8), "1 is older, 8 of another layer");
  for (const CachePolicy kind : {CachePolicy::kLru, CachePolicy::kSieve}) {
    NeuronCache hot(20, 3, kind);
    hot.begin();
    PI2_CHECK(hot.insert(9, true) >= 0, "a fixed key");
    for (int key = 0; key < 8; ++key) {
      hot.begin();
      PI2_CHECK(hot.insert(key) >= 0 && hot.contains(9) && hot.used() <= 3, "key %d", key);
    }
    hot.erase_older(0, 20, hot.now() + 1);
    PI2_CHECK(hot.contains(9) && hot.used() == 1 && hot.look_up(9) >= 0, "what is fixed stays");
    hot.erase(9);
    hot.begin();
    PI2_CHECK(!hot.contains(9) && hot.insert(3) >= 0 && hot.insert(4) >= 0 && hot.insert(5) >= 0, "its slot is free");
  }
  CachePolicy policy;
  PI2_CHECK(policy_of("clock", &policy) == "expected lru, sieve or static, found 'clock'", "a policy's name");
  return 12;
}

// Sets of keys as a layer asks for them, skewed; LRU against a list, and what holds for every policy.
long on_traces(CachePolicy policy, std::int64_t slots, unsigned seed) {
  std::mt19937 rng(seed);
  constexpr std::int64_t kKeys = 300;
  NeuronCache cache(kKeys, slots, policy);
  std::deque<std::int64_t> order;  // LRU, newest first
  std::map<std::int64_t, std::int64_t> where;
  long cases = 0;
  for (int round = 0; round < 400; ++round) {
    std::set<std::int64_t> keys;
    for (unsigned k = 0; k < 1 + rng() % 40; ++k)
      keys.insert(static_cast<std::int64_t>(rng() % kKeys * (rng() % kKeys) / kKeys));
    cache.begin();
    std::set<std::int64_t> hit, missed;
    for (const std::int64_t key : keys) {
      const std::int64_t slot = cache.look_up(key);
      PI2_CHECK((slot >= 0) == (where.count(key) > 0), "key %ld", static_cast<long>(key));
      if (slot >= 0) PI2_CHECK(where[key] == slot, "key %ld has moved", static_cast<long>(key));
      (slot >= 0 ? hit : missed).insert(key);
      if (slot >= 0) {
        order.erase(std::find(order.begin(), order.end(), key));
        order.push_front(key);
      }
    }
    for (const std::int64_t key : missed) {
      const std::int64_t slot = cache.insert(key);
      if (slot < 0) continue;
      for (auto other = where.begin(); other != where.end();) {
        if (cache.contains(other->first)) {
          PI2_CHECK(other->second != slot, "two keys in a slot");
          ++other;
        } else {
          PI2_CHECK(keys.count(other->first) == 0, "a pinned key was evicted");
          if (policy == CachePolicy::kLru) {
            PI2_CHECK(order.back() == other->first, "not the oldest");
            order.pop_back();
          }
          other = where.erase(other);
        }
      }
      where[key] = slot;
      order.push_front(key);
    }
    PI2_CHECK(cache.used() == static_cast<std::int64_t>(where.size()) && cache.used() <= slots, "%ld used",
              static_cast<long>(cache.used()));
    if (round % 50 == 49 && !where.empty()) {
      const std::int64_t key = where.begin()->first;
      cache.erase(key);
      where.erase(key);
      order.erase(std::find(order.begin(), order.end(), key));
    }
    ++cases;
  }
  return cases;
}

}  // namespace

int main() {
  long cases = by_hand();
  for (const CachePolicy policy : {CachePolicy::kLru, CachePolicy::kSieve, CachePolicy::kStatic})
    for (const std::int64_t slots : {0, 1, 7, 60, 300}) cases += on_traces(policy, slots, 3);
  return pi2_test::finish("test_cache", cases);
}
