// The sparse layer's lossless contract (design D5), for every instruction set: threads, batch, the hot/cold boundary
// and supersets of the active set change no bit; all neurons active is the dense layer; counters count what was done.
#include <cmath>
#include <cstring>
#include <thread>

#include "base/convert.h"
#include "pi2/ffn.h"
#include "pi2/kernels.h"
#include "tests/check.h"
#include "tests/random.h"

namespace {

using namespace pi2;
using namespace pi2_test;

// One std::thread per index: the worst case for order of arrival.
ParallelFor threaded(int threads) {
  ParallelFor parallel;
  parallel.threads = threads;
  parallel.run = [](void*, std::int64_t n, ParallelFor::Body body, void* context) {
    std::vector<std::thread> workers;
    for (std::int64_t i = 0; i < n; ++i) workers.emplace_back([=] { body(context, i); });
    for (std::thread& worker : workers) worker.join();
  };
  return parallel;
}

struct Layer {
  std::int64_t neurons, rows, hidden, tokens;
  DType dtype;
  std::vector<char> neuron_rows, bias_gate, bias_up, bias_down;
  std::vector<float> x;
  FfnArgs args;

  Layer(std::mt19937& rng, std::int64_t neurons, std::int64_t rows, std::int64_t hidden, std::int64_t tokens,
        DType dtype)
      : neurons(neurons),
        rows(rows),
        hidden(hidden),
        tokens(tokens),
        dtype(dtype),
        neuron_rows(stored(rng, dtype, neurons * rows * hidden, 1 / std::sqrt(static_cast<float>(hidden)))),
        bias_gate(stored(rng, dtype, neurons)),
        bias_up(stored(rng, dtype, neurons)),
        bias_down(stored(rng, dtype, hidden)),
        x(floats(rng, tokens * hidden)) {
    args.x = x.data();
    args.tokens = tokens;
    args.hidden = hidden;
    args.neuron_rows = neuron_rows.data();
    args.w_dtype = dtype;
    args.neurons = neurons;
    args.rows = rows;
    args.bias_gate = rows == 3 ? bias_gate.data() : nullptr;
    args.bias_up = bias_up.data();
    args.bias_down = bias_down.data();
    args.activation_on_up = rows == 3;
  }

  std::vector<float> run(const ParallelFor& parallel) {
    std::vector<float> y(static_cast<std::size_t>(tokens * hidden), NAN);
    args.y = y.data();
    sparse_ffn(args, parallel);
    return y;
  }

  float weight(std::int64_t neuron, std::int64_t row, std::int64_t k) const {
    return load_float(neuron_rows.data(), dtype, (neuron * rows + row) * hidden + k);
  }

  // relu on every first row (and on up for gated layers), in double.
  std::vector<double> reference(const std::vector<std::uint8_t>& active, std::int64_t n_hot) const {
    std::vector<double> y(static_cast<std::size_t>(tokens * hidden), 0);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t i = 0; i < neurons; ++i) {
        if (i >= n_hot && !active[t * (neurons - n_hot) + i - n_hot]) continue;
        double value[2] = {0, 1};
        for (std::int64_t r = 0; r < rows - 1; ++r) {
          const std::vector<char>& bias = rows == 3 && r == 0 ? bias_gate : bias_up;
          double sum = load_float(bias.data(), dtype, i);
          for (std::int64_t k = 0; k < hidden; ++k) sum += static_cast<double>(weight(i, r, k)) * x[t * hidden + k];
          value[r] = std::fmax(sum, 0);
        }
        for (std::int64_t k = 0; k < hidden; ++k) y[t * hidden + k] += value[0] * value[1] * weight(i, rows - 1, k);
      }
      for (std::int64_t k = 0; k < hidden; ++k) y[t * hidden + k] += load_float(bias_down.data(), dtype, k);
    }
    return y;
  }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

long check_layer(std::mt19937& rng, std::int64_t neurons, std::int64_t rows, std::int64_t hidden, std::int64_t tokens,
                 DType dtype) {
  Layer layer(rng, neurons, rows, hidden, tokens, dtype);
  const std::vector<float> exact = layer.run(serial());
  for (const int threads : {1, 2, 3, 8})
    PI2_CHECK(same_bits(layer.run(threaded(threads)), exact), "%d threads", threads);
  for (const std::int64_t n_hot : {neurons / 3, neurons}) {
    layer.args.n_hot = n_hot;
    PI2_CHECK(same_bits(layer.run(threaded(2)), exact), "n_hot %ld of %ld", static_cast<long>(n_hot),
              static_cast<long>(neurons));
  }
  // Any superset of the firing neurons gives the same bits as the exact gate: here all of them.
  layer.args.n_hot = neurons / 5;
  std::vector<std::uint8_t> active(static_cast<std::size_t>(tokens * (neurons - layer.args.n_hot)), 1);
  layer.args.active = active.data();
  PI2_CHECK(same_bits(layer.run(serial()), exact), "all active, %ld neurons", static_cast<long>(neurons));

  for (std::uint8_t& flag : active) flag = rng() % 4 == 0;
  const std::vector<float> predicted = layer.run(threaded(3));
  const std::vector<double> wanted = layer.reference(active, layer.args.n_hot);
  double error = 0, scale = 1e-3;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    error = std::fmax(error, std::fabs(predicted[i] - wanted[i]));
    scale = std::fmax(scale, std::fabs(wanted[i]));
  }
  PI2_CHECK(error <= 3e-6 * scale, "predicted set: error %g of %g", error, scale);

  for (std::int64_t t = 0; t < tokens; ++t) {  // a token alone, with its own row of the mask
    Layer one = layer;
    one.tokens = 1;
    one.args.tokens = 1;
    one.args.x = layer.x.data() + t * hidden;
    one.args.active = active.data() + t * (neurons - layer.args.n_hot);
    const std::vector<float> alone = one.run(serial());
    PI2_CHECK(std::memcmp(alone.data(), predicted.data() + t * hidden, alone.size() * sizeof(float)) == 0,
              "token %ld alone", static_cast<long>(t));
  }
  return 8 + tokens;
}

void check_counters(std::mt19937& rng) {
  Layer layer(rng, 100, 3, 16, 2, DType::kF32);
  std::vector<std::uint8_t> active(2 * 90, 0);
  for (int i = 0; i < 7; ++i) active[i] = 1;
  layer.args.n_hot = 10;
  layer.args.active = active.data();
  reset_counters();
  layer.run(serial());
  const Counters c = read_counters();
  PI2_CHECK(c.calls == 1 && c.tokens == 2 && c.neurons == 200, "totals %ld %ld %ld", static_cast<long>(c.calls),
            static_cast<long>(c.tokens), static_cast<long>(c.neurons));
  PI2_CHECK(c.gate_rows == 2 * 10 + 7, "gate rows %ld", static_cast<long>(c.gate_rows));
  PI2_CHECK(c.down_rows <= c.up_rows && c.up_rows <= c.gate_rows, "rows %ld %ld", static_cast<long>(c.up_rows),
            static_cast<long>(c.down_rows));
}

void check_nan(std::mt19937& rng) {
  Layer layer(rng, 70, 3, 33, 3, DType::kBF16);
  layer.x[33 + 5] = NAN;  // the second token
  const std::vector<float> y = layer.run(serial());
  PI2_CHECK(!std::isnan(y[0]) && std::isnan(y[33]) && !std::isnan(y[66]),
            "NaN must show in its own token and no other");
}

}  // namespace

int main() {
  std::mt19937 rng(2);
  long cases = 0;
  int count = 0;
  const KernelTable* const* tables = available_kernels(&count);
  for (int i = first_of(count); i < count; ++i) {
    PI2_CHECK(select_kernels(tables[i]->isa), "cannot select %s", tables[i]->isa);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const std::int64_t rows : {2, 3}) {
        for (const std::int64_t tokens : {1, 2, 5, 16, 17, 70}) cases += check_layer(rng, 200, rows, 37, tokens, dtype);
        cases += check_layer(rng, 1, rows, 1, 1, dtype);
        cases += check_layer(rng, 1100, rows, 130, 9, dtype);  // enough arithmetic for threads
      }
    }
    check_counters(rng);
    check_nan(rng);
  }
  PI2_CHECK(!select_kernels("abacus"), "an unknown instruction set was accepted");
  return finish("test_ffn", cases);
}
