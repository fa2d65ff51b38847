#include <atomic>
#include <initializer_list>

#include "ffn/counters.h"

namespace pi2 {
namespace {

struct Atomics {
  std::atomic<std::int64_t> calls{0}, tokens{0}, neurons{0}, gate_rows{0}, up_rows{0}, down_rows{0}, dense_rows{0};
};

Atomics& atomics() {
  static Atomics instance;
  return instance;
}

}  // namespace

void count(const Counters& add) {
  Atomics& a = atomics();
  a.calls.fetch_add(add.calls, std::memory_order_relaxed);
  a.tokens.fetch_add(add.tokens, std::memory_order_relaxed);
  a.neurons.fetch_add(add.neurons, std::memory_order_relaxed);
  a.gate_rows.fetch_add(add.gate_rows, std::memory_order_relaxed);
  a.up_rows.fetch_add(add.up_rows, std::memory_order_relaxed);
  a.down_rows.fetch_add(add.down_rows, std::memory_order_relaxed);
  a.dense_rows.fetch_add(add.dense_rows, std::memory_order_relaxed);
}

Counters read_counters() {
  const Atomics& a = atomics();
  return {a.calls.load(),   a.tokens.load(),    a.neurons.load(),   a.gate_rows.load(),
          a.up_rows.load(), a.down_rows.load(), a.dense_rows.load()};
}

void reset_counters() {
  Atomics& a = atomics();
  for (auto* value : {&a.calls, &a.tokens, &a.neurons, &a.gate_rows, &a.up_rows, &a.down_rows, &a.dense_rows})
    value->store(0);
}

}  // namespace pi2
