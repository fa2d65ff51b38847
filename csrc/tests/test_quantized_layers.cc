// Layers over quantised weights, for every instruction set: linear and sparse_ffn against sums in double over the
// dequantised weights; threads, company and the hot/cold boundary change no bit; prompts against the token by token
// path.
#include <cmath>
#include <cstring>

#include "pi2/ffn.h"
#include "pi2/kernels.h"
#include "pi2/linear.h"
#include "pi2/thread_pool.h"
#include "tests/check.h"
#include "tests/random.h"

namespace {

using namespace pi2;
using namespace pi2_test;

// A float matrix, quantised, and what the quantised one says.
struct Matrix {
  std::vector<char> rows;
  std::vector<float> values;

  Matrix(std::mt19937& rng, std::int64_t count, std::int64_t columns, DType dtype) {
    if (is_ggml(dtype)) {  // nothing is quantised to these
      for (std::int64_t r = 0; r < count; ++r)
        for (const char byte : quantized_row(rng, dtype, columns)) rows.push_back(byte);
      values.resize(static_cast<std::size_t>(count * columns));
      dequantize(rows.data(), dtype, count, columns, row_bytes(dtype, columns), values.data(), DType::kF32, serial());
      return;
    }
    const std::vector<float> w = floats(rng, count * columns);
    rows.resize(static_cast<std::size_t>(count * row_bytes(dtype, columns)));
    values.resize(w.size());
    (void)quantize(w.data(), DType::kF32, count, columns, dtype, rows.data(), serial());
    dequantize(rows.data(), dtype, count, columns, row_bytes(dtype, columns), values.data(), DType::kF32, serial());
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < w.size(); ++i) {
      error += (w[i] - values[i]) * (w[i] - values[i]);
      norm += w[i] * w[i];
    }
    const double most = dtype == DType::kQ4 ? 0.11 : 0.008;
    PI2_CHECK(std::sqrt(error / norm) <= most, "quantisation error %g", std::sqrt(error / norm));
  }
};

// Largest difference over the largest magnitude.
double off(const std::vector<float>& found, const std::vector<double>& wanted) {
  double error = 0, scale = 1e-6;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (std::isnan(found[i])) return NAN;
    error = std::fmax(error, std::fabs(found[i] - wanted[i]));
    scale = std::fmax(scale, std::fabs(wanted[i]));
  }
  return error / scale;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b, std::int64_t n) {
  return std::memcmp(a.data(), b.data(), static_cast<std::size_t>(n) * sizeof(float)) == 0;
}

// Of float and of int8 activations; random blocks have scales of any size, and few of them count.
double bound(DType dtype, bool int8_activations) { return int8_activations ? (is_ggml(dtype) ? 0.06 : 0.02) : 3e-6; }

long check_linear(std::mt19937& rng, std::int64_t rows, std::int64_t columns, std::int64_t tokens, DType dtype,
                  bool int8_activations) {
  const Matrix w(rng, rows, columns, dtype);
  const std::vector<float> x = floats(rng, tokens * columns), bias = floats(rng, rows);
  std::vector<float> y(static_cast<std::size_t>(tokens * rows), NAN), again = y;
  LinearArgs args;
  args.x = x.data();
  args.y = y.data();
  args.tokens = tokens;
  args.columns = columns;
  args.weights = w.rows.data();
  args.w_dtype = dtype;
  args.rows = rows;
  args.bias = bias.data();
  args.int8_activations = int8_activations;
  linear(args, serial());
  std::vector<double> wanted;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t r = 0; r < rows; ++r) {
      double sum = bias[r];
      for (std::int64_t k = 0; k < columns; ++k)
        sum += static_cast<double>(w.values[r * columns + k]) * x[t * columns + k];
      wanted.push_back(sum);
    }
  }
  const double error = off(y, wanted);
  PI2_CHECK(error <= bound(dtype, int8_activations), "%ld x %ld, %ld tokens, a8 %d: off by %g", static_cast<long>(rows),
            static_cast<long>(columns), static_cast<long>(tokens), int8_activations, error);
  args.y = again.data();
  for (const int threads : {2, 3, 7}) {
    ThreadPool pool(threads);
    std::fill(again.begin(), again.end(), NAN);
    linear(args, pool.parallel());
    PI2_CHECK(same_bits(again, y, tokens * rows), "linear, %d threads", threads);
  }
  args.tokens = int8_activations && tokens >= kGemmTokens ? kGemmTokens : 1;  // on the same side of kGemmTokens
  linear(args, serial());
  PI2_CHECK(same_bits(again, y, args.tokens * rows), "linear: bits depend on company");
  return 5;
}

// Neurons whose down rows may have another dtype.
struct Neurons {
  std::vector<char> bytes;
  std::vector<float> values;

  Neurons(std::mt19937& rng, std::int64_t neurons, std::int64_t rows, std::int64_t hidden, DType dtype, DType down) {
    const Matrix first(rng, neurons * (rows - 1), hidden, dtype), last(rng, neurons, hidden, down);
    for (std::int64_t i = 0; i < neurons; ++i) {
      add(first, i, (rows - 1) * row_bytes(dtype, hidden), (rows - 1) * hidden);
      add(last, i, row_bytes(down, hidden), hidden);
    }
  }

  void add(const Matrix& w, std::int64_t i, std::int64_t some_bytes, std::int64_t numbers) {
    bytes.insert(bytes.end(), w.rows.begin() + i * some_bytes, w.rows.begin() + (i + 1) * some_bytes);
    values.insert(values.end(), w.values.begin() + i * numbers, w.values.begin() + (i + 1) * numbers);
  }
};

long check_ffn(std::mt19937& rng, std::int64_t neurons, std::int64_t rows, std::int64_t hidden, std::int64_t tokens,
               DType dtype, bool int8_activations, bool few_fire = false, DType down = DType::kF32) {
  const bool other_down = down != DType::kF32;
  const Neurons w(rng, neurons, rows, hidden, dtype, other_down ? down : dtype);
  const std::vector<float> x = floats(rng, tokens * hidden), bias_up = floats(rng, neurons),
                           bias_down = floats(rng, hidden);
  std::vector<float> bias_gate = floats(rng, neurons);
  std::int64_t firing = 0;
  if (few_fire)  // the bias alone keeps seven of eight neurons from firing
    for (std::int64_t i = 0; i < neurons; ++i) bias_gate[i] -= i % 8 == 0 ? 0.0f : 1e3f;
  std::vector<float> y(static_cast<std::size_t>(tokens * hidden), NAN), again = y;
  FfnArgs args;
  args.x = x.data();
  args.y = y.data();
  args.tokens = tokens;
  args.hidden = hidden;
  args.neuron_rows = w.bytes.data();
  args.w_dtype = dtype;
  args.down_dtype = down;
  args.other_down = other_down;
  args.neurons = neurons;
  args.rows = rows;
  args.int8_activations = int8_activations;
  args.bias_gate = rows == 3 ? bias_gate.data() : nullptr;
  args.bias_up = bias_up.data();
  args.bias_down = bias_down.data();
  sparse_ffn(args, serial());
  std::vector<double> wanted(static_cast<std::size_t>(tokens * hidden));
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t i = 0; i < neurons; ++i) {
      double value[2] = {0, 1};
      for (std::int64_t r = 0; r < rows - 1; ++r) {
        value[r] = (rows == 3 && r == 0 ? bias_gate : bias_up)[i];
        for (std::int64_t k = 0; k < hidden; ++k)
          value[r] += static_cast<double>(w.values[(i * rows + r) * hidden + k]) * x[t * hidden + k];
      }
      const double h = std::fmax(value[0], 0) * value[1];
      firing += h != 0;
      for (std::int64_t k = 0; k < hidden; ++k)
        wanted[t * hidden + k] += h * w.values[(i * rows + rows - 1) * hidden + k];
    }
    for (std::int64_t k = 0; k < hidden; ++k) wanted[t * hidden + k] += bias_down[k];
  }
  if (rows == 3 && neurons > 1000)
    PI2_CHECK((5 * firing < tokens * neurons) == few_fire, "%ld fire", static_cast<long>(firing));
  const double error = off(y, wanted);
  PI2_CHECK(error <= 2 * bound(dtype, int8_activations), "ffn %ld x %ld x %ld, %ld tokens, a8 %d: off by %g",
            static_cast<long>(neurons), static_cast<long>(rows), static_cast<long>(hidden), static_cast<long>(tokens),
            int8_activations, error);
  args.y = again.data();
  for (const int threads : {2, 3, 8}) {
    ThreadPool pool(threads);
    std::fill(again.begin(), again.end(), NAN);
    sparse_ffn(args, pool.parallel());
    PI2_CHECK(same_bits(again, y, tokens * hidden), "ffn, %d threads", threads);
  }
  args.n_hot = neurons / 3;
  sparse_ffn(args, serial());
  PI2_CHECK(same_bits(again, y, tokens * hidden), "ffn, hot and cold");
  const bool prompt = int8_activations && tokens >= kGemmTokens;
  args.tokens = prompt ? kGemmTokens : 1;
  sparse_ffn(args, serial());
  PI2_CHECK(same_bits(again, y, args.tokens * hidden), "ffn: bits depend on company");
  args.tokens = tokens;
  const std::vector<std::uint8_t> active(static_cast<std::size_t>(tokens * (neurons - args.n_hot)), 1);
  args.active = active.data();  // a superset of what fires; never through panels
  sparse_ffn(args, serial());
  if (prompt) {
    const double apart = off(again, std::vector<double>(y.begin(), y.end()));
    PI2_CHECK(apart <= 1e-4, "panels differ from dots by %g", apart);
  } else {
    PI2_CHECK(same_bits(again, y, tokens * hidden), "ffn, all active");
  }
  return 7;
}

void check_nan(std::mt19937& rng, std::int64_t tokens, bool int8_activations) {
  const std::int64_t n = 70;
  const Matrix w(rng, 3 * n, n, DType::kQ4);
  std::vector<float> x = floats(rng, tokens * n), y(static_cast<std::size_t>(tokens * n));
  x[n + 5] = NAN;
  FfnArgs args;
  args.x = x.data();
  args.y = y.data();
  args.tokens = tokens;
  args.hidden = n;
  args.neuron_rows = w.rows.data();
  args.w_dtype = DType::kQ4;
  args.neurons = n;
  args.int8_activations = int8_activations;
  sparse_ffn(args, serial());
  PI2_CHECK(!std::isnan(y[0]) && std::isnan(y[n]) && !std::isnan(y[2 * n]), "NaN: its own token and no other");
}

}  // namespace

int main() {
  std::mt19937 rng(4);
  long cases = 0;
  int count = 0;
  const KernelTable* const* tables = available_kernels(&count);
  for (int i = first_of(count); i < count; ++i) {
    PI2_CHECK(select_kernels(tables[i]->isa), "cannot select %s", tables[i]->isa);
    for (const DType dtype : {DType::kQ4, DType::kQ8}) {
      for (const bool a8 : {false, true}) {
        for (const std::int64_t tokens : {1, 3, 8, 13, 130}) {
          cases += check_linear(rng, 45, 111, tokens, dtype, a8);
          cases += check_ffn(rng, 85, 3, 111, tokens, dtype, a8);
        }
        cases += check_linear(rng, 1, 1, 1, dtype, a8);
        cases += check_linear(rng, 700, 513, 5, dtype, a8);
        cases += check_linear(rng, 64, 128, 15, dtype, a8);
        cases += check_ffn(rng, 40, 2, 33, 14, dtype, a8);
        for (const bool few_fire : {false, true})  // more than one chunk, and threads
          cases += check_ffn(rng, 1100, 3, 160, 14, dtype, a8, few_fire);
      }
    }
    for (const DType dtype :
         {DType::kQ4_1, DType::kQ5_0, DType::kQ5_1, DType::kQ4K, DType::kQ5K, DType::kQ6K, DType::kTQ2}) {
      for (const bool a8 : {false, true}) {
        const std::int64_t block = ggml_block(dtype).numbers;
        for (const std::int64_t tokens : {1, 3, 8, 13, 130})
          cases += check_linear(rng, 45, 3 * block, tokens, dtype, a8);
        for (const std::int64_t tokens : {1, 3, 14})
          for (const DType down : {DType::kQ4, DType::kQ8})
            cases += check_ffn(rng, 85, 3, 256, tokens, dtype, a8, false, down);
        cases += check_ffn(rng, 45, 3, 256, 130, dtype, a8, false, a8 ? DType::kQ4 : DType::kQ8);
        cases += check_ffn(rng, 40, 2, 256, 14, dtype, a8, false, DType::kQ8);
        for (const std::int64_t tokens : {1, 3, 14, 130})
          if (dtype == DType::kTQ2) cases += check_ffn(rng, 85, 3, 256, tokens, dtype, a8, false, dtype);
        cases += check_linear(rng, 9, block, 2, dtype, a8);
        cases += check_linear(rng, 700, 2 * block, 5, dtype, a8);
      }
    }
    cases += check_ffn(rng, 1100, 3, 160, 14, DType::kQ4, true, true, DType::kQ8);
    cases += check_ffn(rng, 85, 3, 111, 5, DType::kQ8, false, false, DType::kQ4);
    check_nan(rng, 3, false);
    check_nan(rng, 3, true);
    check_nan(rng, kGemmTokens + 1, true);
  }
  return finish("test_quantized_layers", cases);
}
