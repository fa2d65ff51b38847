// What stays in a store's cache whatever its policy says, while it changes: the same bits, nothing evicted that is to
// stay, what is missing read in the background, and replays that have the hits of a run that began so.
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "cache/cache_use.h"
#include "cache/rebalance_plan.h"
#include "tests/store_calls.h"

namespace {

using namespace pi2;
using namespace pi2_test;

using Counts = std::vector<std::int64_t>;

// Until all is as it was asked for; false after a minute.
bool arranged(Offload* offload) {
  for (int i = 0; i < 600000; ++i) {
    if (offload->stats(false).arranging == 0) return true;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return false;
}

// The most frequent of so many of each layer: slot by slot.
Counts room_for(const Counts& wanted, std::int64_t slots) {
  Counts found(wanted.size(), 0);
  const std::int64_t most = *std::max_element(wanted.begin(), wanted.end());
  for (std::int64_t rank = 0; rank < most; ++rank) {
    for (std::size_t l = wanted.size(); l-- > 0;) {
      if (rank >= wanted[l] || slots == 0) continue;
      ++found[l];
      --slots;
    }
  }
  return found;
}

std::int64_t total(const Counts& counts) {
  std::int64_t sum = 0;
  for (const std::int64_t n : counts) sum += n;
  return sum;
}

Counts random_counts(std::mt19937& rng, std::size_t layers, std::int64_t most) {
  Counts counts;
  for (std::size_t l = 0; l < layers; ++l) {
    const auto n = static_cast<std::int64_t>(rng() % static_cast<unsigned>(most + 1));
    counts.push_back(rng() % 4 == 0 ? 0 : rng() % 4 == 0 ? most : n);
  }
  return counts;
}

// Neurons first..last - 1 of a layer, and nothing else.
Case of_range(std::mt19937& rng, const StoreFixture& store, std::int64_t layer, std::int64_t first, std::int64_t last) {
  Case made(rng, store, layer, 1, 2);
  std::fill(made.active.begin(), made.active.end(), static_cast<std::uint8_t>(0));
  std::fill(made.active.begin() + first, made.active.begin() + last, static_cast<std::uint8_t>(1));
  FfnArgs args = made.arguments(store);
  args.neuron_rows = store.neuron_rows[static_cast<std::size_t>(layer)].data();
  sparse_ffn(args, serial());
  made.wanted = made.y;
  return made;
}

// Whether each layer's first neurons, so many after `skipped`, are in memory, in the right bits.
bool all_there(std::mt19937& rng, const StoreFixture& store, Offload* offload, const Counts& neurons,
               std::int64_t skipped = 0) {
  bool there = true;
  for (std::size_t l = 0; l < neurons.size(); ++l) {
    if (neurons[l] == 0) continue;
    offload->stats(true);
    Case call = of_range(rng, store, static_cast<std::int64_t>(l), skipped, skipped + neurons[l]);
    const std::string wrong = call.run(offload, store);
    PI2_CHECK(wrong.empty(), "%s", wrong.c_str());
    const OffloadStats stats = offload->stats(true);
    there = there && stats.hits + stats.used == stats.wanted && stats.wanted == neurons[l];
  }
  return there;
}

// The bookkeeping alone: from any set of fixed slots to any other, also from the middle of the way.
long check_pieces(std::mt19937& rng) {
  long done = 0;
  for (int round = 0; round < 300; ++round) {
    const std::size_t layers = 1 + rng() % 4;
    Counts slots;
    for (std::size_t l = 0; l < layers; ++l) slots.push_back(1 + static_cast<std::int64_t>(rng() % 60));
    RebalancePlan plan;
    plan.set_up(slots, 1 + static_cast<std::int64_t>(rng() % 20));
    std::set<std::pair<std::int64_t, std::int64_t>> fixed;
    for (std::size_t l = 0; l < layers && rng() % 2 == 0; ++l) {  // by preload()
      const auto n = static_cast<std::int64_t>(rng() % static_cast<unsigned>(slots[l] + 1));
      for (std::int64_t s = 0; s < n; ++s) fixed.insert({static_cast<std::int64_t>(l), s});
      plan.may_be_fixed(l, n);
    }
    for (int change = 0; change < 4; ++change) {
      Counts begin, count;
      for (const std::int64_t n : slots) {
        begin.push_back(rng() % 3 == 0 ? static_cast<std::int64_t>(rng() % static_cast<unsigned>(n)) : 0);
        count.push_back(static_cast<std::int64_t>(rng() % static_cast<unsigned>(n - begin.back() + 1)));
      }
      plan.set(begin, count);
      RebalancePlan::Piece piece;
      std::int64_t released = 1 << 20, steps = change == 3 ? 1 << 20 : static_cast<std::int64_t>(rng() % 40);
      for (; steps > 0 && plan.next(&piece); --steps) {
        PI2_CHECK(
            piece.first < piece.last && piece.first >= 0 && piece.last <= slots[static_cast<std::size_t>(piece.layer)],
            "a piece");
        if (piece.release) PI2_CHECK(std::exchange(released, piece.first) >= piece.first, "the rarest are first");
        const std::int64_t part = piece.release ? piece.last : piece.first + 1 + static_cast<std::int64_t>(rng() % 3);
        const std::int64_t until = std::min(piece.last, part);
        for (std::int64_t s = piece.first; s < until; ++s) {
          PI2_CHECK(piece.release != plan.holds(piece.layer, s), "which are to be fixed");
          if (piece.release)
            fixed.erase({piece.layer, s});
          else
            fixed.insert({piece.layer, s});
        }
        plan.done(piece, until);
      }
      if (plan.pending()) continue;
      std::set<std::pair<std::int64_t, std::int64_t>> wanted;
      for (std::size_t l = 0; l < layers; ++l)
        for (std::int64_t s = begin[l]; s < begin[l] + count[l]; ++s) wanted.insert({static_cast<std::int64_t>(l), s});
      PI2_CHECK(fixed == wanted && plan.left() == 0, "%zu fixed of %zu", fixed.size(), wanted.size());
      ++done;
    }
    PI2_CHECK(!plan.pending(), "it has no end");
    Counts wanted = random_counts(rng, layers, 60);
    const auto room = static_cast<std::int64_t>(rng() % 150);
    PI2_CHECK(fitting(wanted, room) == room_for(wanted, room), "which have room");
  }
  return done;
}

// Every policy lets in what is to stay, and never evicts it.
long check_what_stays(std::mt19937& rng) {
  const StoreFixture store(rng, 3, 200, 3, 64, DType::kQ4);
  const std::int64_t place = place_bytes(store, false);
  std::vector<Case> cases;
  for (int i = 0; i < 12; ++i) cases.emplace_back(rng, store, i % 3, i % 6 == 5 ? 40 : i % 4 == 3 ? 3 : 1, 3);
  long done = 0;
  for (const CachePolicy policy : kCachePolicies) {
    for (const char* engine : {"pread", "io_uring"}) {
      for (const std::int64_t slots : {60, 300, 600}) {
        OffloadOptions options;
        options.policy = name_of(policy);
        options.engine = engine;
        options.direct = false;
        options.cache_bytes = slots * place;
        options.io_threads = 3;
        options.in_flight = 2;
        options.window = slots == 300 ? 2 : 0;
        const std::unique_ptr<Offload> offload = opened(store, options, slots == 600 ? 1 << 18 : 1024);
        if (offload == nullptr) continue;
        if (slots > 60) PI2_CHECK(offload->preload().empty(), "preload");
        for (int round = 0; round < 3; ++round) {
          const Counts wanted = random_counts(rng, 3, 200);
          const std::string refused = offload->arrange(wanted);
          PI2_CHECK(refused.empty(), "%s", refused.c_str());
          if (round == 1) continue;  // the next one comes while it is on its way
          if (round == 2) PI2_CHECK(cases[0].run(offload.get(), store, 2).empty(), "a call meanwhile");
          PI2_CHECK(arranged(offload.get()), "%s: it never ends", options.policy.c_str());
          const Counts fixed = room_for(wanted, policy == CachePolicy::kNone ? 0 : slots);
          PI2_CHECK(offload->stats(false).fixed == total(fixed), "%s: %ld fixed, not %ld", options.policy.c_str(),
                    static_cast<long>(offload->stats(false).fixed), static_cast<long>(total(fixed)));
          for (int again = 0; again < 2; ++again) {
            PI2_CHECK(all_there(rng, store, offload.get(), fixed), "%s %s, %ld slots, round %d", options.policy.c_str(),
                      engine, static_cast<long>(slots), round);
            for (Case& each : cases) {
              offload->prefetch((each.layer + 1) % 3, 0, each.active.data(), 1);
              const std::string wrong = each.run(offload.get(), store, 2);
              PI2_CHECK(wrong.empty(), "%s", wrong.c_str());
            }
          }
          const OffloadStats stats = offload->stats(false);
          PI2_CHECK(stats.fixed == total(fixed) && stats.arranging == 0 && stats.resident <= stats.slots, "afterwards");
          ++done;
        }
      }
    }
  }
  return done;
}

// A cache that has every neuron, then not, then again: places that neurons no longer have are never read.
long check_everything_there(std::mt19937& rng) {
  long cases = 0;
  for (const std::int64_t cluster : {1, 8}) {
    const StoreFixture store(rng, 2, 300, 3, 64, DType::kQ4, 0, cluster);
    const std::int64_t place = place_bytes(store, false), all = 2 * ((300 + cluster - 1) / cluster);
    OffloadOptions options;
    options.engine = "pread";
    options.direct = false;
    options.cache_bytes = all * place;
    const std::unique_ptr<Offload> offload = opened(store, options);
    PI2_CHECK(offload->preload().empty(), "preload");
    for (const std::int64_t slots : {all, all, all / 2, all / 2, all, all, all - 1, all, all}) {
      PI2_CHECK(offload->resize(slots * place, 0).empty() && offload->stats(false).slots == slots, "resize");
      for (int i = 0; i < 6; ++i, ++cases) {
        Case one(rng, store, i % 2, 1 + i / 2, 2);
        const bool there = offload->stats(true).resident == all;
        const std::string wrong = one.run(offload.get(), store);
        const OffloadStats stats = offload->stats(true);
        PI2_CHECK(wrong.empty(), "cluster %ld, %ld slots: %s", static_cast<long>(cluster), static_cast<long>(slots),
                  wrong.c_str());
        PI2_CHECK(!there || (stats.hits == stats.wanted && stats.wanted > 0 && stats.reads == 0),
                  "%ld of %ld were there, %ld reads", static_cast<long>(stats.hits), static_cast<long>(stats.wanted),
                  static_cast<long>(stats.reads));
      }
    }
    PI2_CHECK(offload->preload().empty() && offload->stats(false).resident == all, "all are there at the end");
  }
  return cases;
}

// A slot has eight neurons, the last of a layer has fewer; and a layer's first neurons may be somebody else's.
long check_slots_and_what_is_left_out(std::mt19937& rng) {
  const StoreFixture store(rng, 2, 150, 3, 64, DType::kQ4, 0, 8);  // 19 slots
  OffloadOptions options;
  options.direct = false;
  options.cache_bytes = 30 * place_bytes(store, false);
  const std::unique_ptr<Offload> offload = opened(store, options);
  PI2_CHECK(offload->arrange({9, 150}).empty() && arranged(offload.get()), "arrange");
  PI2_CHECK(offload->stats(true).fixed == 2 + 19 && all_there(rng, store, offload.get(), {16, 150}), "whole slots");
  PI2_CHECK(offload->preload().empty(), "preload");
  PI2_CHECK(offload->stats(true).fixed == 2 + 19 && offload->stats(true).resident > 21, "and others beside them");
  offload->leave_out({64, 64});
  PI2_CHECK(arranged(offload.get()) && offload->stats(true).fixed == 2 + 11, "after what is left out");
  PI2_CHECK(all_there(rng, store, offload.get(), {16, 86}, 64), "which are not the same");
  return 3;
}

// What is to stay is filled first, then the rest; a smaller cache keeps it, and one of another size has room for more.
long check_sizes(std::mt19937& rng) {
  const StoreFixture store(rng, 2, 4000, 2, 512, DType::kF32);
  const std::int64_t place = place_bytes(store, true);
  long done = 0;
  for (const CachePolicy policy : kCachePolicies) {
    if (policy == CachePolicy::kNone) continue;
    OffloadOptions options;
    options.policy = name_of(policy);
    options.cache_bytes = 6000 * place;
    options.in_flight = 1;
    const std::unique_ptr<Offload> offload = opened(store, options, 1 << 18);
    PI2_CHECK(offload->arrange({1000, 3000}).empty() && offload->preload().empty(), "arrange and preload");
    PI2_CHECK(arranged(offload.get()), "it never ends");
    OffloadStats stats = offload->stats(true);
    PI2_CHECK(stats.fixed == 4000 && stats.resident == 6000, "%ld of %ld", static_cast<long>(stats.fixed),
              static_cast<long>(stats.resident));
    const std::int64_t full = resident_bytes();
    PI2_CHECK(offload->arrange({100, 900}, 1200 * place).empty(), "smaller");
    stats = offload->stats(true);
    PI2_CHECK(stats.slots == 1200 && stats.resident == 1200 && stats.fixed == 1000 && stats.reads == 0, "%s: %ld fixed",
              options.policy.c_str(), static_cast<long>(stats.fixed));
    const std::int64_t freed = full - resident_bytes();
    PI2_CHECK(freed > 4500 * place, "%ld bytes of %ld went back", static_cast<long>(freed),
              static_cast<long>(4800 * place));
    PI2_CHECK(arranged(offload.get()) && all_there(rng, store, offload.get(), {100, 900}), "they have stayed");
    PI2_CHECK(offload->resize(500 * place, 0.5).empty() && arranged(offload.get()), "another size");
    PI2_CHECK(offload->stats(true).fixed == 500 && all_there(rng, store, offload.get(), {100, 400}),
              "which has no room for all");
    PI2_CHECK(offload->arrange({100, 2000}, 5000 * place).empty() && arranged(offload.get()), "larger");
    PI2_CHECK(offload->stats(true).fixed == 2100 && all_there(rng, store, offload.get(), {100, 2000}), "all of it");
    PI2_CHECK(offload->stats(true).slots == 5000, "slots");
    ++done;
  }
  return done;
}

// So many bytes a second, one command after another.
std::vector<double> device(double bandwidth) {
  return {1e-5, 32, 0, 1, 1, 1, 4096, 1e9, 1, bandwidth, 1, 1, 1, 4096, 1e9, 1, bandwidth};
}

// Only so much is on its way at a time, and neither arrange() nor a call of something else waits for all of it.
long check_amount(std::mt19937& rng) {
  const StoreFixture store(rng, 2, 600, 2, 512, DType::kF32);  // 4 KiB each
  OffloadOptions options;
  options.engine = "pread";
  options.cache_bytes = 1200 * place_bytes(store, true);
  const std::unique_ptr<Offload> filled = opened(store, options, 1 << 18);
  PI2_CHECK(filled->arrange({600, 600}).empty() && arranged(filled.get()), "without a device");
  PI2_CHECK(filled->stats(true).bytes_read == 1200 * 4096, "each is read once");
  options.device = device(3e6);
  const std::unique_ptr<Offload> offload = opened(store, options, 1 << 18);
  const auto amount = [&](std::int64_t wanted) {
    const OffloadStats stats = offload->stats(false);
    const std::int64_t there = (wanted - stats.arranging) * 4096;
    PI2_CHECK(stats.bytes_read <= there + (1 << 20) + (1 << 18), "%ld bytes read, %ld there",
              static_cast<long>(stats.bytes_read), static_cast<long>(there));
    return stats.arranging;
  };
  PI2_CHECK(offload->arrange({600, 300}).empty(), "arrange");
  while (amount(900) > 800) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  PI2_CHECK(offload->arrange({0, 600}).empty(), "another one meanwhile");
  Case call = of_range(rng, store, 1, 580, 600);
  PI2_CHECK(call.run(offload.get(), store, 2).empty(), "a call of what is last");
  const OffloadStats stats = offload->stats(false);
  PI2_CHECK(stats.hits == 0 && stats.wanted == 20 && stats.arranging > 0, "%ld hits, %ld to come",
            static_cast<long>(stats.hits), static_cast<long>(stats.arranging));
  PI2_CHECK(arranged(offload.get()) && offload->stats(false).fixed == 600, "the second");
  PI2_CHECK(all_there(rng, store, offload.get(), {0, 600}), "all of it");
  return 4;
}

// A store that is closed while something is on its way.
long check_end(std::mt19937& rng) {
  const StoreFixture store(rng, 2, 300, 3, 64, DType::kQ4);
  for (int round = 0; round < 40; ++round) {
    OffloadOptions options;
    options.cache_bytes = (50 + 10 * round) * place_bytes(store, true);
    options.engine = round % 2 == 0 ? "pread" : "io_uring";
    if (round % 4 == 3) options.device = device(4e6);
    const std::unique_ptr<Offload> offload = opened(store, options, 4096);
    if (offload == nullptr) continue;
    if (round % 3 == 0) PI2_CHECK(offload->preload().empty(), "preload");
    PI2_CHECK(offload->arrange({300, 300}).empty(), "arrange");
    if (round % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50 * round));
  }
  return 40;
}

long check_refusals(std::mt19937& rng) {
  const StoreFixture store(rng, 2, 64, 2, 32, DType::kF32);
  OffloadOptions options;
  options.direct = false;
  options.cache_bytes = 20 * place_bytes(store, false);
  const std::unique_ptr<Offload> offload = opened(store, options);
  const std::string most = std::to_string(options.cache_bytes), more = std::to_string(options.cache_bytes + 256);
  const std::pair<std::string, std::string> all[] = {
      {offload->arrange({1}), "resident: expected 2 numbers, one of each layer, found 1"},
      {offload->arrange({1, 65}), "resident: expected 0 to 64 neurons of layer 1, found 65"},
      {offload->arrange({-1, 5}), "resident: expected 0 to 64 neurons of layer 0, found -1"},
      {offload->arrange({1, 1}, options.cache_bytes + 256),
       "cache_bytes: expected 0 to " + most + ", with which it was opened, found " + more},
      {offload->arrange({1, 1}, -2), "cache_bytes: expected 0 to " + most + ", with which it was opened, found -2"}};
  for (const auto& [found, wanted] : all) PI2_CHECK(found == wanted, "found '%s'", found.c_str());
  PI2_CHECK(offload->stats(false).arranging == 0 && offload->stats(false).fixed == 0, "nothing has changed");
  PI2_CHECK(offload->arrange({3, 4}).empty() && arranged(offload.get()), "one that can be");
  const pid_t child = fork();
  if (child == 0) {
    const bool refused = offload->arrange({1, 1}).find("in another process (fork)") != std::string::npos;
    _exit(refused && offload->stats(false).fixed == 0 ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  PI2_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child");
  PI2_CHECK(offload->arrange({4, 3}).empty() && arranged(offload.get()), "its parent");
  options.engine = "mmap";
  PI2_CHECK(opened(store, options)->arrange({1, 1}).find("engine: expected pread or io_uring, found mmap") == 0,
            "mmap");
  return 8;
}

// Calls of several threads, guesses and prompts among them, while others arrange, resize, fill, record and ask.
long check_company(std::mt19937& rng) {
  const StoreFixture store(rng, 2, 200, 3, 64, DType::kQ4);
  const std::int64_t place = place_bytes(store, false);
  long done = 0;
  for (const char* policy : {"lru", "lfu", "s3-fifo"}) {
    OffloadOptions options;
    options.direct = false;
    options.policy = policy;
    options.cache_bytes = 250 * place;
    options.io_threads = 4;
    options.in_flight = 2;
    const std::unique_ptr<Offload> offload = opened(store, options, 2048);
    std::vector<Case> cases;
    for (int i = 0; i < 4; ++i) cases.emplace_back(rng, store, i % 2, i == 2 ? 40 : i == 3 ? 3 : 1, 3);
    std::vector<std::thread> threads;
    std::atomic<int> left{4};
    for (Case& each : cases) {
      threads.emplace_back([&] {
        ThreadPool pool(2);
        for (int round = 0; round < 25; ++round) {
          std::fill(each.y.begin(), each.y.end(), -1.0f);
          const auto guess = [&] { offload->prefetch(1 - each.layer, 0, each.active.data(), 1); };
          const std::string wrong =
              offload->ffn(each.layer, Predictor(), each.arguments(store), pool.parallel(), guess);
          PI2_CHECK(wrong.empty() && each.y == each.wanted, "%s", wrong.c_str());
        }
        --left;
      });
    }
    threads.emplace_back([&] {
      for (std::mt19937 other(5); left.load() > 0; std::this_thread::yield()) {
        const bool sized = other() % 4 == 0;
        const auto bytes = static_cast<std::int64_t>(other() % 251) * place;
        PI2_CHECK(offload->arrange(random_counts(other, 2, 200), sized ? bytes : Offload::kSameSize).empty(),
                  "arrange");
      }
    });
    int sizes = 0;
    for (std::mt19937 other(4); left.load() > 0; ++sizes) {
      if (sizes % 6 == 0)
        PI2_CHECK(offload->resize(static_cast<std::int64_t>(other() % 251) * place, 0.5).empty(), "resize");
      if (sizes % 6 == 1) PI2_CHECK(offload->preload().empty(), "preload");
      if (sizes % 6 == 2) PI2_CHECK(offload->record_accesses(1 << 12).empty(), "recording");
      if (sizes % 6 == 3) offload->take_accesses();
      if (sizes % 6 == 4) offload->leave_out({static_cast<std::int64_t>(other() % 50), 0});
      const OffloadStats stats = offload->stats(false);
      PI2_CHECK(stats.resident <= stats.slots && stats.fixed <= stats.resident, "statistics");
    }
    for (std::thread& thread : threads) thread.join();
    offload->leave_out({0, 0});
    PI2_CHECK(offload->arrange({120, 60}, 250 * place).empty() && arranged(offload.get()), "in the end");
    PI2_CHECK(offload->stats(true).fixed == 180 && all_there(rng, store, offload.get(), {120, 60}), "all of it");
    done += 100;
  }
  return done;
}

// Arranged and filled in any order, or not filled, or opened larger: a replay has the run's hits, for every policy.
long check_replay(std::mt19937& rng, std::int64_t cluster) {
  const StoreFixture store(rng, 2, 150, 3, 32, DType::kQ4, cluster == 1 ? 10 : 0, cluster);
  const std::int64_t place = place_bytes(store, false), keys = 2 * ((150 + cluster - 1) / cluster);
  std::vector<Case> cases;
  for (int i = 0; i < 40; ++i) cases.emplace_back(rng, store, i % 2, i % 9 == 8 ? 3 : i % 20 == 19 ? 40 : 1, 4);
  const std::vector<ReplayLayer> layers = {{150, cluster}, {150, cluster}};
  const Counts all[] = {{0, 0}, {30, 30}, {150, 3}, {20, 150}};
  long done = 0;
  for (const CachePolicy policy : kCachePolicies) {
    for (const std::int64_t slots : {keys / 20, keys / 3, 2 * keys / 3, keys}) {
      for (int how = 0; how < 5; ++how) {
        const Counts& resident = all[static_cast<std::size_t>(done) % std::size(all)];
        OffloadOptions options;
        options.policy = name_of(policy);
        options.direct = false;
        options.cache_bytes = (how == 3 ? keys : slots) * place;
        options.in_flight = 1 + how % 3;
        options.io_threads = 2;
        options.window = how == 2 ? 3 : 0;
        options.engine = "pread";
        const std::unique_ptr<Offload> offload = opened(store, options);
        if (how == 0 || how == 3 || how == 4) PI2_CHECK(offload->preload().empty(), "preload");
        if (how == 4) PI2_CHECK(offload->arrange(resident).empty() && arranged(offload.get()), "twice the same");
        PI2_CHECK(offload->arrange(resident, how == 3 ? slots * place : Offload::kSameSize).empty(), "arrange");
        if (how == 1) PI2_CHECK(offload->preload().empty(), "preload");
        PI2_CHECK(arranged(offload.get()), "it never ends");
        PI2_CHECK(offload->record_accesses(1 << 20).empty(), "recording");
        for (Case& each : cases) PI2_CHECK(each.run(offload.get(), store, 2).empty(), "a call");
        const OffloadStats stats = offload->stats(false);
        const Accesses found = offload->take_accesses();
        PI2_CHECK(found.whole, "%s, %ld slots, how %d", options.policy.c_str(), static_cast<long>(slots), how);
        ReplayOptions again{options.policy, slots, 0.5, how != 2, options.window, resident};
        const ReplayCounts counts = sum(replay(view(found), layers, again));
        PI2_CHECK(counts.hits == found.hits && counts.wanted == stats.wanted,
                  "%s, %ld slots, how %d: a replay hits %ld of %ld, the run %ld", options.policy.c_str(),
                  static_cast<long>(slots), how, static_cast<long>(counts.hits), static_cast<long>(stats.wanted),
                  static_cast<long>(found.hits));
        if (policy != CachePolicy::kNone) {
          const ReplayCounts best = sum(replay_optimal(view(found), layers, again));
          // Of slots: a slot may have several neurons that are wanted, or one.
          PI2_CHECK(best.missed <= counts.missed, "%s beats the optimum", options.policy.c_str());
        }
        ++done;
      }
    }
  }
  return done;
}

// When a recording is not that of a cache as it was arranged.
long check_not_whole(std::mt19937& rng) {
  const StoreFixture store(rng, 2, 200, 2, 512, DType::kF32);
  for (int how = 0; how < 4; ++how) {
    OffloadOptions options;
    options.engine = "pread";
    options.cache_bytes = 300 * place_bytes(store, true);
    if (how == 1) options.device = device(4e6);
    const std::unique_ptr<Offload> offload = opened(store, options, 1 << 16);
    Case call(rng, store, 0, 1, 3);
    if (how == 2) PI2_CHECK(call.run(offload.get(), store).empty(), "a call before");
    PI2_CHECK(offload->arrange({100, 100}).empty(), "arrange");
    if (how != 1) PI2_CHECK(arranged(offload.get()), "it never ends");
    PI2_CHECK(offload->record_accesses(1 << 16).empty(), "recording");  // how 1: it is on its way
    if (how == 3) PI2_CHECK(offload->arrange({101, 100}).empty() && arranged(offload.get()), "meanwhile");
    PI2_CHECK(call.run(offload.get(), store).empty(), "a call");
    PI2_CHECK(offload->take_accesses().whole == (how == 0), "how %d", how);
    PI2_CHECK(offload->record_accesses(1 << 16).empty() && call.run(offload.get(), store).empty(), "again");
    PI2_CHECK(!offload->take_accesses().whole, "the second recording has not the calls of the first");
  }
  const Accesses none;
  for (const auto& [fixed, wanted] : {std::pair<Counts, std::string>{{1},
                                                                     "fixed: expected 2 numbers, one of each "
                                                                     "layer, found 1"},
                                      {{1, 9}, "fixed: expected 0 to 8 neurons of layer 1, found 9"}}) {
    std::string found;
    try {
      replay(view(none), {{8, 1}, {8, 1}}, {"lru", 4, 0, false, 0, fixed});
    } catch (const std::invalid_argument& error) {
      found = error.what();
    }
    PI2_CHECK(found == wanted, "found '%s'", found.c_str());
  }
  return 6;
}

}  // namespace

int main() {
  std::mt19937 rng(17);
  long cases = check_pieces(rng) + check_refusals(rng) + check_what_stays(rng);
  cases += check_slots_and_what_is_left_out(rng) + check_everything_there(rng);
  cases += check_sizes(rng) + check_amount(rng) + check_end(rng) + check_company(rng);
  cases += check_replay(rng, 1) + check_replay(rng, 8) + check_not_whole(rng);
  return finish("test_arrange", cases);
}
