// Stores whose cache gets another size between calls, and replays of what calls wanted: for every policy of the list
// the bits stay the same, and a replay has the hits that the run had.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <set>
#include <stdexcept>
#include <thread>

#include "cache/neuron_cache.h"
#include "pi2/offload.h"
#include "pi2/replay.h"
#include "pi2/thread_pool.h"
#include "tests/store_calls.h"

namespace {

using namespace pi2;
using namespace pi2_test;

// Between calls the cache gets other sizes, is filled again, and guesses are on their way.
long check_resize(std::mt19937& rng) {
  const StoreFixture store(rng, 2, 150, 3, 96, DType::kQ4, 10);
  const std::int64_t place = place_bytes(store, false);
  std::vector<Case> cases;
  for (int i = 0; i < 24; ++i) cases.emplace_back(rng, store, i % 2, i % 7 == 6 ? 3 : 1, 3);
  long done = 0;
  for (const CachePolicy policy : kCachePolicies) {
    for (const char* engine : {"pread", "io_uring"}) {
      OffloadOptions options;
      options.policy = name_of(policy);
      options.engine = engine;
      options.direct = false;
      options.cache_bytes = 250 * place;
      options.in_flight = 2;
      options.io_threads = 3;
      const std::unique_ptr<Offload> offload = opened(store, options);
      if (offload == nullptr) continue;
      PI2_CHECK(offload->preload().empty(), "preload");
      std::int64_t slots = 250;
      for (std::size_t i = 0; i < cases.size(); ++i) {
        if (i % 3 == 2) {
          offload->prefetch(cases[i].layer, 10, cases[i].active.data(), 1);
          slots = static_cast<std::int64_t>(rng() % 251);
          if (i % 6 == 5) slots = 250;
          const std::string wrong = offload->resize(slots * place + place / 2, i % 2 == 0 ? 0.9 : 0.3);
          PI2_CHECK(wrong.empty(), "%s", wrong.c_str());
          const OffloadStats stats = offload->stats(false);
          if (policy == CachePolicy::kNone) slots = 0;
          PI2_CHECK(stats.slots == slots && stats.resident <= slots && stats.cache_bytes == slots * place,
                    "%ld slots for %ld", static_cast<long>(stats.slots), static_cast<long>(slots));
          if (i % 12 == 11) {
            PI2_CHECK(offload->preload().empty(), "preload");
            PI2_CHECK(offload->stats(false).resident >= slots - 1, "filled but for what a layer's share rounds off");
          }
        }
        const std::string wrong = cases[i].run(offload.get(), store, 1 + static_cast<int>(i % 3));
        PI2_CHECK(wrong.empty(), "%s %s, call %zu: %s", options.policy.c_str(), engine, i, wrong.c_str());
        ++done;
      }
    }
  }
  return done;
}

// The most frequent stay when it becomes smaller; what was pushed out is read again.
long check_what_stays(std::mt19937& rng) {
  const StoreFixture store(rng, 2, 100, 3, 64, DType::kQ4);
  OffloadOptions options;
  options.direct = false;
  const std::int64_t place = place_bytes(store, false);
  options.cache_bytes = 200 * place;
  const std::unique_ptr<Offload> offload = opened(store, options);
  PI2_CHECK(offload->preload().empty() && offload->stats(true).resident == 200, "all of it");
  PI2_CHECK(offload->resize(40 * place, 0.5).empty() && offload->stats(false).resident == 40, "a fifth");
  Case all(rng, store, 0, 1, 1);
  std::fill(all.active.begin(), all.active.end(), static_cast<std::uint8_t>(0));
  std::fill(all.active.begin(), all.active.begin() + 10, static_cast<std::uint8_t>(1));
  FfnArgs args = all.arguments(store);
  PI2_CHECK(offload->ffn(0, Predictor(), args, serial()).empty() && offload->stats(true).hits == 10, "the first ten");
  PI2_CHECK(offload->stats(false).evictions == 0 && offload->resize(200 * place, 0.5).empty(), "large again");
  PI2_CHECK(offload->stats(true).resident == 40, "with what was there");
  PI2_CHECK(offload->preload().empty() && offload->stats(true).resident == 200, "filled again");
  std::fill(all.active.begin(), all.active.end(), static_cast<std::uint8_t>(1));
  args = all.arguments(store);
  args.neuron_rows = store.neuron_rows[0].data();
  sparse_ffn(args, serial());
  all.wanted = all.y;
  PI2_CHECK(all.run(offload.get(), store).empty() && offload->stats(true).bytes_read == 0, "from memory");
  return 6;
}

long check_memory(std::mt19937& rng) {
  const StoreFixture store(rng, 1, 4000, 2, 512, DType::kF32);
  const std::int64_t place = place_bytes(store, true);
  OffloadOptions options;
  options.cache_bytes = 4000 * place;
  options.in_flight = 1;
  const std::unique_ptr<Offload> offload = opened(store, options);
  PI2_CHECK(offload->preload().empty(), "preload");
  const std::int64_t full = resident_bytes();
  PI2_CHECK(offload->resize(400 * place, 0.5).empty(), "resize");
  const std::int64_t freed = full - resident_bytes();
  PI2_CHECK(freed > 3400 * place, "%ld bytes of %ld went back", static_cast<long>(freed),
            static_cast<long>(3600 * place));
  return 1;
}

long check_refusals(std::mt19937& rng) {
  const StoreFixture store(rng, 1, 64, 2, 32, DType::kF32);
  OffloadOptions options;
  options.direct = false;
  options.cache_bytes = 20 * place_bytes(store, false);
  const std::unique_ptr<Offload> offload = opened(store, options);
  const std::string more = std::to_string(options.cache_bytes + 256);
  PI2_CHECK(offload->resize(options.cache_bytes + 256, 0.5) == "cache_bytes: expected 0 to " +
                                                                   std::to_string(options.cache_bytes) +
                                                                   ", with which it was opened, found " + more,
            "%s", offload->resize(options.cache_bytes + 256, 0.5).c_str());
  PI2_CHECK(offload->resize(-1, 0.5).find("cache_bytes: expected 0 to ") == 0, "below nothing");
  PI2_CHECK(offload->resize(0, 1.5).find("hot_share: expected 0 to 1, found 1.5") == 0, "hot share");
  PI2_CHECK(offload->record_accesses(100).empty(), "recording");
  PI2_CHECK(offload->record_accesses(100) == "accesses are being recorded already", "twice");
  Case some(rng, store, 0, 1, 2);
  for (int i = 0; i < 15; ++i) PI2_CHECK(some.run(offload.get(), store).empty(), "a call");
  const Accesses twelve = offload->take_accesses();
  PI2_CHECK(twelve.layers.size() == 12 && twelve.bits.size() == 96 && twelve.lost == 3 && !twelve.whole, "%zu calls",
            twelve.layers.size());
  PI2_CHECK(offload->take_accesses().layers.empty(), "none are recorded any more");
  // What else changes the cache: calls before, another size, guesses, filling it meanwhile.
  for (int how = 0; how < 6; ++how) {
    const std::unique_ptr<Offload> fresh = opened(store, options);
    if (how == 1) PI2_CHECK(some.run(fresh.get(), store).empty(), "a call");
    PI2_CHECK(fresh->preload().empty() && fresh->record_accesses(1 << 12).empty(), "recording");
    if (how == 2) PI2_CHECK(fresh->resize(0, 0.5).empty(), "resize");
    if (how == 3) fresh->prefetch(0, 0, some.active.data(), 1);
    if (how == 4) PI2_CHECK(fresh->preload().empty(), "preload");
    PI2_CHECK(some.run(fresh.get(), store).empty(), "a call");
    const bool whole = fresh->take_accesses().whole;
    PI2_CHECK(whole == (how == 0 || how == 5), "how %d", how);
  }
  const pid_t child = fork();
  if (child == 0) {
    const bool refused = offload->resize(0, 0.5).find("in another process (fork)") != std::string::npos &&
                         offload->record_accesses(1).find("in another process (fork)") != std::string::npos &&
                         offload->take_accesses().layers.empty();
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  PI2_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child");
  options.engine = "mmap";
  PI2_CHECK(opened(store, options)->resize(0, 0.5).find("engine: expected pread or io_uring, found mmap") == 0, "mmap");
  return 15;
}

// Calls of several threads, guesses among them, while another one resizes, records and asks for statistics.
long check_company(std::mt19937& rng) {
  const StoreFixture store(rng, 2, 200, 3, 64, DType::kQ4);
  const std::int64_t place = place_bytes(store, false);
  OffloadOptions options;
  options.direct = false;
  options.cache_bytes = 100 * place;
  options.io_threads = 4;
  const std::unique_ptr<Offload> offload = opened(store, options);
  std::vector<Case> cases;
  for (int i = 0; i < 3; ++i) cases.emplace_back(rng, store, i % 2, 1, 3);
  std::vector<std::thread> threads;
  std::atomic<int> left{3};
  for (Case& each : cases) {
    threads.emplace_back([&] {
      ThreadPool pool(2);
      for (int round = 0; round < 25; ++round) {
        std::fill(each.y.begin(), each.y.end(), -1.0f);
        const auto guess = [&] { offload->prefetch(1 - each.layer, 0, each.active.data(), 1); };
        const std::string wrong = offload->ffn(each.layer, Predictor(), each.arguments(store), pool.parallel(), guess);
        PI2_CHECK(wrong.empty() && each.y == each.wanted, "%s", wrong.c_str());
      }
      --left;
    });
  }
  int sizes = 0;
  for (std::mt19937 other(4); left.load() > 0; ++sizes) {
    PI2_CHECK(offload->resize(static_cast<std::int64_t>(other() % 101) * place, 0.5).empty(), "resize");
    if (sizes % 4 == 0) PI2_CHECK(offload->preload().empty(), "preload");
    if (sizes % 4 == 1) PI2_CHECK(offload->record_accesses(1 << 12).empty(), "recording");
    if (sizes % 4 == 2) offload->take_accesses();
    offload->stats(false);
  }
  for (std::thread& thread : threads) thread.join();
  PI2_CHECK(sizes > 0, "no resize");
  return 75;
}

// The run's hits, call by call of every kind: single tokens, small batches, streamed prompts, clusters of neurons.
long check_replay(std::mt19937& rng, std::int64_t cluster) {
  const StoreFixture store(rng, 2, 150, 3, 32, DType::kQ4, cluster == 1 ? 10 : 0, cluster);
  const std::int64_t place = place_bytes(store, false), keys = 2 * ((150 + cluster - 1) / cluster);
  std::vector<Case> cases;
  for (int i = 0; i < 60; ++i) cases.emplace_back(rng, store, i % 2, i % 9 == 8 ? 3 : i % 20 == 19 ? 40 : 1, 4);
  const std::vector<ReplayLayer> layers = {{150, cluster}, {150, cluster}};
  long done = 0;
  for (const CachePolicy policy : kCachePolicies) {
    for (const std::int64_t slots : {std::int64_t{0}, keys / 20, keys / 3, 2 * keys / 3, keys}) {
      for (const int how : {0, 1, 2}) {
        OffloadOptions options;
        options.policy = name_of(policy);
        options.direct = false;
        options.cache_bytes = slots * place;
        options.in_flight = 1 + how;
        options.window = how == 1 ? 3 : 0;
        options.hot_share = how == 2 ? 0.0 : 0.5;
        options.engine = "pread";
        const std::unique_ptr<Offload> offload = opened(store, options);
        if (how != 1) PI2_CHECK(offload->preload().empty(), "preload");
        PI2_CHECK(offload->record_accesses(1 << 20).empty(), "recording");
        for (Case& each : cases) PI2_CHECK(each.run(offload.get(), store, 2).empty(), "a call");
        const OffloadStats stats = offload->stats(false);
        const Accesses found = offload->take_accesses();
        PI2_CHECK(found.hits == stats.hits && found.wanted == stats.wanted && found.lost == 0 && found.whole &&
                      found.layers.size() > 59,
                  "%ld hits", static_cast<long>(found.hits));
        ReplayOptions again{options.policy, slots, options.hot_share, how != 1, options.window};
        const ReplayCounts counts = sum(replay(view(found), layers, again));
        PI2_CHECK(counts.hits == stats.hits && counts.wanted == stats.wanted,
                  "%s, %ld slots, %d: a replay hits %ld of %ld, the run %ld", options.policy.c_str(),
                  static_cast<long>(slots), how, static_cast<long>(counts.hits), static_cast<long>(stats.wanted),
                  static_cast<long>(stats.hits));
        again.slots = policy == CachePolicy::kNone ? 0 : slots;
        const ReplayCounts best = sum(replay_optimal(view(found), layers, again));
        PI2_CHECK(best.hits >= counts.hits && best.wanted == counts.wanted && best.missed <= counts.missed,
                  "%s beats the optimum: %ld of %ld", options.policy.c_str(), static_cast<long>(counts.hits),
                  static_cast<long>(best.hits));
        ++done;
      }
    }
  }
  return done;
}

Accesses random_accesses(std::mt19937& rng, std::int64_t neurons, int calls, unsigned most) {
  Accesses a;
  for (int c = 0; c < calls; ++c) {
    a.layers.push_back(0);
    a.streamed.push_back(0);
    const std::size_t at = a.bits.size();
    a.bits.resize(at + static_cast<std::size_t>((neurons + 7) / 8), 0);
    for (unsigned k = 0; k < 1 + rng() % most; ++k) {
      const auto i = static_cast<std::size_t>(rng() % static_cast<unsigned>(neurons));
      a.bits[at + i / 8] = static_cast<std::uint8_t>(a.bits[at + i / 8] | 1u << (i % 8));
    }
  }
  return a;
}

std::set<int> wanted_of(const Accesses& a, std::int64_t neurons, std::size_t call) {
  std::set<int> wanted;
  const auto row = static_cast<std::size_t>((neurons + 7) / 8);
  for (int i = 0; i < neurons; ++i)
    if (a.bits[call * row + static_cast<std::size_t>(i) / 8] >> (i % 8) & 1) wanted.insert(i);
  return wanted;
}

// The most hits from `call` on, by trying all that a cache can keep.
int best_hits(const Accesses& a, std::int64_t neurons, std::size_t call, const std::set<int>& there,
              std::size_t slots) {
  if (call == a.layers.size()) return 0;
  const std::set<int> wanted = wanted_of(a, neurons, call);
  int hits = 0;
  for (const int i : wanted) hits += there.count(i) > 0;
  std::set<int> both = there;
  both.insert(wanted.begin(), wanted.end());
  const std::vector<int> all(both.begin(), both.end());
  int best = 0;
  for (unsigned keep = 0; keep < 1u << all.size(); ++keep) {
    if (static_cast<std::size_t>(__builtin_popcount(keep)) != std::min(slots, all.size())) continue;
    std::set<int> kept;
    for (std::size_t i = 0; i < all.size(); ++i)
      if (keep >> i & 1) kept.insert(all[i]);
    best = std::max(best, best_hits(a, neurons, call + 1, kept, slots));
  }
  return hits + best;
}

long check_optimum(std::mt19937& rng) {
  for (int round = 0; round < 40; ++round) {
    const Accesses a = random_accesses(rng, 6, 6, 3);
    const auto slots = static_cast<std::int64_t>(rng() % 4);
    ReplayOptions options{"", slots, 0.5, round % 2 == 0, 0};
    std::set<int> there;
    for (int i = 0; round % 2 == 0 && i < slots; ++i) there.insert(i);
    const int best = best_hits(a, 6, 0, there, static_cast<std::size_t>(slots));
    const ReplayCounts found = sum(replay_optimal(view(a), {{6, 1}}, options));
    PI2_CHECK(found.hits == best && found.missed == found.wanted - best, "%ld hits, not %d",
              static_cast<long>(found.hits), best);
  }
  return 40;
}

long check_damage(std::mt19937& rng) {
  const Accesses sound = random_accesses(rng, 12, 5, 4);
  const auto refused = [](const Accesses& a, std::vector<ReplayLayer> layers, const char* policy = "lru") {
    try {
      replay(view(a), layers, {policy, 5, 0.5, true, 0});
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  PI2_CHECK(refused(sound, {{12, 1}}).empty(), "a sound one");
  PI2_CHECK(refused(sound, {{12, 1}}, "clock").find("policy: expected lru, ") == 0, "policy");
  PI2_CHECK(refused(sound, {{32, 1}}) == "expected 20 bytes of bits, found 10", "too short");
  PI2_CHECK(refused(sound, {{12, 0}}).find("layers: expected neurons") == 0, "cluster");
  Accesses wrong = sound;
  wrong.layers[3] = 1;
  PI2_CHECK(refused(wrong, {{12, 1}}) == "call 3: expected layer 0 to 0, found 1", "layer");
  wrong = sound;
  wrong.streamed[2] = 2;
  PI2_CHECK(refused(wrong, {{12, 1}}) == "call 2: expected streamed 0 or 1, found 2", "streamed");
  wrong = sound;
  wrong.bits[1] = static_cast<std::uint8_t>(wrong.bits[1] | 0x10);
  PI2_CHECK(refused(wrong, {{12, 1}}) == "call 0: a neuron past the last of its layer", "past the end");
  return 7;
}

}  // namespace

int main() {
  std::mt19937 rng(13);
  long cases = check_refusals(rng) + check_resize(rng) + check_what_stays(rng) + check_memory(rng);
  cases += check_replay(rng, 1) + check_replay(rng, 8) + check_optimum(rng) + check_damage(rng);
  cases += check_company(rng);
  return finish("test_replay", cases);
}
