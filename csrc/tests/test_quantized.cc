// Every kernel over quantised rows of every instruction set this CPU has, against sums in double over the format as
// types.h documents it. All buffers end at an inaccessible page (guarded.h): nothing may be touched past a row, past n
// inputs, past padded(n) floats. And what quantising refuses.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "pi2/kernels.h"
#include "pi2/linear.h"
#include "pi2/thread_pool.h"
#include "tests/check.h"
#include "tests/guarded.h"
#include "tests/random.h"

namespace {

using namespace pi2;
using namespace pi2_test;

constexpr std::int64_t kSizes[] = {1, 7, 15, 17, 31, 32, 33, 63, 64, 65, 111, 127, 128, 129, 160, 257, 989, 1024, 1088};
constexpr std::int64_t kTokens = 9;
constexpr DType kGgml[] = {DType::kQ4_1, DType::kQ5_0, DType::kQ5_1, DType::kQ4K,
                           DType::kQ5K,  DType::kQ6K,  DType::kTQ2};

struct Kernels {  // of one dtype, with float or int8 activations
  const KernelTable& table;
  DType dtype;
  bool a8;
  DotFn dot;
  PrepareFn prepare;

  Kernels(const KernelTable& table, DType dtype, bool a8)
      : table(table),
        dtype(dtype),
        a8(a8),
        dot((a8 ? table.dot_a8 : table.dot)[static_cast<int>(dtype)]),
        prepare((a8 ? table.prepare_a8 : table.prepare)[static_cast<int>(dtype)]) {
    PI2_CHECK(dot != nullptr && prepare != nullptr, "%s", name());
  }
  bool missing() const { return dot == nullptr || prepare == nullptr; }
  const char* name() const {
    static char text[64];
    std::snprintf(text, sizeof(text), "%s %s%s", table.isa, kDTypeNames[static_cast<int>(dtype)], a8 ? " int8" : "");
    return text;
  }
  Guarded prepared(const std::vector<float>& x) const {
    const auto n = static_cast<std::int64_t>(x.size());
    const Guarded input(x.data(), n * 4);  // unaligned unless n is a multiple of 16
    Guarded out(padded(n) * 4);
    std::memset(out.data(), 0xff, static_cast<std::size_t>(out.size()));  // NaN: what was there must not matter
    prepare(input.as<float>(), n, out.data());
    return out;
  }
};

// x as dots see it: with int8 activations rounded by the policy in scalar/quantized.h.
std::vector<double> seen(const std::vector<float>& x, bool a8) {
  std::vector<double> out(x.begin(), x.end());
  for (std::size_t begin = 0; a8 && begin < x.size(); begin += kGroup) {
    const std::size_t end = std::min(x.size(), begin + kGroup);
    float largest = 0;
    for (std::size_t k = begin; k < end; ++k) largest = std::fmax(largest, std::fabs(x[k]));
    const float inverse = 127 / largest;  // infinite for zeros and the smallest numbers, which count as zero
    for (std::size_t k = begin; k < end; ++k)
      out[k] = std::isfinite(inverse) ? static_cast<double>(std::nearbyint(x[k] * inverse)) * (largest / 127) : 0.0;
  }
  return out;
}

// The n-th kind of input: normal, with subnormals in between, all subnormal, all zero.
std::vector<float> inputs(std::mt19937& rng, std::int64_t n, std::int64_t kind) {
  std::vector<float> x = floats(rng, n);
  for (std::int64_t k = 0; k < n; ++k) {
    if (kind % 4 == 1 && k % 3 == 0) x[k] *= 1e-39f;
    if (kind % 4 == 2) x[k] *= 1e-39f;
    if (kind % 4 == 3) x[k] = 0;
  }
  return x;
}

// What a kernel adds up in place of each weight is at most so large. With int8 activations the offsets of a group of
// ggml's (numbers to 63 times a scale, less a min) are summed apart from the rest, which is some times the largest
// weight.
std::vector<double> magnitudes_of(const std::vector<double>& weights, DType dtype, bool a8) {
  std::vector<double> out(weights.size());
  for (std::size_t k = 0; k < weights.size(); ++k) {
    double largest = std::fabs(weights[k]);
    for (std::size_t i = k / 32 * 32; is_ggml(dtype) && a8 && i < k / 32 * 32 + 32; ++i)
      largest = std::fmax(largest, 4 * std::fabs(weights[i]));
    out[k] = largest;
  }
  return out;
}

long check_dot(const Kernels& kernels, std::int64_t n, std::mt19937& rng) {
  long cases = 0;
  std::vector<std::vector<double>> weights, x;
  std::vector<Guarded> rows_R, x_T;
  const void* rows[kDotRows];
  const void* inputs_T[kTokens];
  for (int r = 0; r < kDotRows; ++r) {
    const std::vector<char> row = quantized_row(rng, kernels.dtype, n);
    weights.push_back(weights_of(row, kernels.dtype, n));
    rows_R.emplace_back(row.data(), static_cast<std::int64_t>(row.size()));
    rows[r] = rows_R.back().data();
  }
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const std::vector<float> values = inputs(rng, n, t);
    x.push_back(seen(values, kernels.a8));
    x_T.push_back(kernels.prepared(values));
    inputs_T[t] = x_T.back().data();
  }
  float alone[kDotRows][kTokens];
  for (int r = 0; r < kDotRows; ++r) {
    const std::vector<double> magnitudes = magnitudes_of(weights[r], kernels.dtype, kernels.a8);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      kernels.dot(&rows[r], 1, &inputs_T[t], 1, n, &alone[r][t], nullptr);
      double sum = 0, magnitude = 0;
      for (std::int64_t k = 0; k < n; ++k) {
        sum += weights[r][k] * x[t][k];
        magnitude += std::fabs(magnitudes[k] * x[t][k]);
      }
      // The second term: one subnormal rounding a product.
      PI2_CHECK(std::fabs(alone[r][t] - sum) <= 1e-6 * magnitude + 1e-44 * static_cast<double>(n),
                "%s n %ld token %ld: %g, wanted %g of %g", kernels.name(), static_cast<long>(n), static_cast<long>(t),
                alone[r][t], sum, magnitude);
      ++cases;
    }
  }
  for (const std::int64_t tokens : {1, 2, 3, 4, 5, 9}) {
    for (std::int64_t count = 1; count <= kDotRows; ++count) {
      const Guarded out(count * tokens * 4);
      kernels.dot(rows, count, inputs_T, tokens, n, out.as<float>(), rows);
      for (std::int64_t r = 0; r < count; ++r)
        PI2_CHECK(std::memcmp(out.as<float>() + r * tokens, alone[r], static_cast<std::size_t>(tokens) * 4) == 0,
                  "%s n %ld, %ld rows, %ld tokens: bits differ from a token alone", kernels.name(),
                  static_cast<long>(n), static_cast<long>(count), static_cast<long>(tokens));
      ++cases;
    }
  }
  return cases;
}

// What is broken in one token shows in that token and in no other.
long check_broken(const Kernels& kernels, std::int64_t n, std::mt19937& rng) {
  const std::vector<char> row = quantized_row(rng, kernels.dtype, n);
  const void* rows[2] = {row.data(), row.data()};
  for (const float broken : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> values = floats(rng, n);
    const Guarded sound = kernels.prepared(values);
    values[rng() % static_cast<unsigned>(n)] = broken;
    const Guarded hurt = kernels.prepared(values);
    const void* x_T[5] = {sound.data(), sound.data(), hurt.data(), sound.data(), sound.data()};
    float out[10];
    kernels.dot(rows, 2, x_T, 5, n, out, nullptr);
    for (int i = 0; i < 10; ++i)
      PI2_CHECK(std::isfinite(out[i]) == (i % 5 != 2), "%s n %ld: %g in one token gives %g in token %d", kernels.name(),
                static_cast<long>(n), broken, out[i], i % 5);
  }
  return 3;
}

// kPanelRows rows in a block, number by number: see kernels.h.
std::vector<char> block_of(const void* const* rows, DType dtype, std::int64_t n) {
  const bool q4 = dtype == DType::kQ4;
  const std::int64_t group_bytes = q4 ? kGroup / 2 : kGroup;
  std::vector<char> block;
  const GgmlBlock super = ggml_block(dtype);
  const std::int64_t first = dtype == DType::kQ5_0 ? 2 : 0;  // behind the scale, which comes last
  for (std::int64_t i = 0; is_ggml(dtype) && i < n / super.numbers; ++i)
    for (std::int64_t at = 0, bytes = 4; at < super.bytes; at += bytes) {
      bytes = std::min<std::int64_t>(4, super.bytes - at);
      for (std::int64_t r = 0; r < kPanelRows; ++r)
        for (std::int64_t k = at; k < at + bytes; ++k)
          block.push_back(static_cast<const char*>(rows[r])[i * super.bytes + (k + first) % super.bytes]);
    }
  if (is_ggml(dtype)) return block;
  for (std::int64_t g = 0; g < groups(n); g += 2) {
    for (std::int64_t at = g * group_bytes; at < (g + 2) * group_bytes; at += 4)
      for (std::int64_t r = 0; r < kPanelRows; ++r)
        for (std::int64_t k = at; k < at + 4; ++k)
          block.push_back(static_cast<char>(static_cast<const char*>(rows[r])[k] ^ (q4 ? 0 : 128)));
    for (std::int64_t i = g; i < g + 2; ++i)
      for (std::int64_t r = 0; r < kPanelRows; ++r)
        for (std::int64_t k = 0; k < 2; ++k)
          block.push_back(static_cast<const char*>(rows[r])[groups(n) * group_bytes + 2 * i + k]);
  }
  return block;
}

// What goes into a matrix product, and what it gives for each token alone.
struct Product {
  static constexpr std::int64_t kRows = kGemmPanels * kPanelRows, kMost = 17, kBroken = 5;
  const KernelTable& table;
  DType dtype;
  std::int64_t n;
  std::vector<std::vector<double>> weights, x;
  std::vector<Guarded> rows_R, x_T;
  const void* rows[kRows];
  const void* inputs_T[kMost];
  std::vector<float> alone;

  Product(const KernelTable& table, DType dtype, std::int64_t n, std::mt19937& rng)
      : table(table), dtype(dtype), n(n), alone(kMost * kRows) {
    for (std::int64_t r = 0; r < kRows; ++r) {
      std::vector<char> row = quantized_row(rng, dtype, n);
      // The largest sums there are, which must be exact.
      if (r == 0 && is_quantized(dtype))
        std::fill(row.begin(), row.end() - 2 * groups(n), static_cast<char>(dtype == DType::kQ4 ? 255 : 128));
      weights.push_back(weights_of(row, dtype, n));
      rows_R.emplace_back(row.data(), static_cast<std::int64_t>(row.size()));
      rows[r] = rows_R.back().data();
    }
    for (std::int64_t t = 0; t < kMost; ++t) {
      std::vector<float> values = inputs(rng, n, t);
      if (t == kBroken - 1) std::fill(values.begin(), values.end(), -1.0f);
      x.push_back(seen(values, true));
      if (t == kBroken) values[n / 2] = NAN;
      const Guarded input(values.data(), n * 4);
      x_T.emplace_back(gemm_input_bytes(n));
      std::memset(x_T.back().data(), 0xff, static_cast<std::size_t>(x_T.back().size()));
      table.prepare_gemm[index()](input.as<float>(), n, x_T.back().data());
      inputs_T[t] = x_T.back().data();
    }
  }

  int index() const { return static_cast<int>(dtype); }

  void check_alone() const {
    for (std::int64_t t = 0; t < kMost; ++t) {
      for (std::int64_t r = 0; r < kRows; ++r) {
        const std::vector<double> magnitudes = magnitudes_of(weights[r], dtype, true);
        double sum = 0, magnitude = 0;
        for (std::int64_t k = 0; k < n; ++k) {
          sum += weights[r][k] * x[t][k];
          magnitude += std::fabs(magnitudes[k] * x[t][k]);
        }
        const float found = alone[t * kRows + r];
        PI2_CHECK(t == kBroken ? std::isnan(found)
                               : std::fabs(found - sum) <= 1e-6 * magnitude + 1e-44 * static_cast<double>(n),
                  "%s dtype %d n %ld product of row %ld and token %ld: %g, wanted %g of %g", table.isa, index(),
                  static_cast<long>(n), static_cast<long>(r), static_cast<long>(t), found, sum, magnitude);
      }
    }
  }
};

std::vector<char> blocks_of(const Product& product) {
  std::vector<char> made;
  for (std::int64_t p = 0; p < kGemmPanels; ++p)
    for (const char byte : block_of(product.rows + p * kPanelRows, product.dtype, product.n)) made.push_back(byte);
  PI2_CHECK(static_cast<std::int64_t>(made.size()) == product.kRows * row_bytes(product.dtype, product.n),
            "blocks have other bytes than their rows");
  if (is_ggml(product.dtype)) return made;
  // to_blocks makes the same of rows one behind the other, and of rows that do not fill the last block.
  const auto bytes = static_cast<std::size_t>(row_bytes(product.dtype, product.n));
  std::vector<char> rows, all(made.size()), some(made.size(), 1);
  for (const void* row : product.rows)
    rows.insert(rows.end(), static_cast<const char*>(row), static_cast<const char*>(row) + bytes);
  to_blocks(rows.data(), product.dtype, product.kRows, product.n, all.data());
  PI2_CHECK(all == made, "dtype %d n %ld: to_blocks", product.index(), static_cast<long>(product.n));
  to_blocks(rows.data(), product.dtype, product.kRows - 5, product.n, some.data());
  const std::size_t whole = made.size() / 2;
  PI2_CHECK(std::memcmp(some.data(), made.data(), whole) == 0, "to_blocks: the block before the last one");
  for (std::size_t at = whole; at < some.size(); ++at)
    PI2_CHECK(some[at] == made[at] || some[at] == 0, "to_blocks: byte %zu beyond the rows", at);
  return made;
}

// What is made of blocks is what is made of their rows, for any number of tokens.
void check_blocks(const Product& product) {
  const std::int64_t n = product.n;
  const std::vector<char> made = blocks_of(product);
  for (std::int64_t count = 1; count <= kGemmPanels; ++count) {
    const std::int64_t width = count * kPanelRows, ldo = width + 3;
    const Guarded blocks(made.data(), width * row_bytes(product.dtype, n));
    for (std::int64_t tokens = 1; tokens <= Product::kMost; ++tokens) {
      const Guarded out(((tokens - 1) * ldo + width) * 4);
      product.table.dot_blocks[product.index()](blocks.data(), count, product.inputs_T, tokens, n, out.as<float>(),
                                                ldo);
      for (std::int64_t t = 0; t < tokens; ++t)
        PI2_CHECK(std::memcmp(out.as<float>() + t * ldo, &product.alone[t * Product::kRows],
                              static_cast<std::size_t>(width) * 4) == 0,
                  "%s dtype %d n %ld, %ld blocks, %ld tokens: dot_blocks has other bits than a token alone",
                  product.table.isa, product.index(), static_cast<long>(n), static_cast<long>(count),
                  static_cast<long>(tokens));
    }
  }
}

// Rows in their own order give what their block gives.
void check_lanes(const Product& product) {
  const std::int64_t n = product.n, ldo = kPanelRows + 3;
  for (std::int64_t tokens = 1; tokens <= 5; ++tokens) {
    for (std::int64_t p = 0; p < kGemmPanels; ++p) {
      const Guarded out(((tokens - 1) * ldo + kPanelRows) * 4);
      product.table.dot_lanes[product.index()](product.rows + p * kPanelRows, p == 0 ? product.rows : nullptr,
                                               product.inputs_T, tokens, n, out.as<float>(), ldo);
      for (std::int64_t t = 0; t < tokens; ++t)
        PI2_CHECK(std::memcmp(out.as<float>() + t * ldo, &product.alone[t * Product::kRows + p * kPanelRows],
                              kPanelRows * 4) == 0,
                  "%s dtype %d n %ld, %ld tokens: dot_lanes has other bits than dot_blocks", product.table.isa,
                  product.index(), static_cast<long>(n), static_cast<long>(tokens));
    }
  }
}

// Panels of kPanelRows rows times many tokens. Sets what a token gives alone.
void check_gemm(Product* product) {
  const KernelTable& table = product->table;
  const std::int64_t n = product->n;
  const int d = product->index();
  std::vector<Guarded> panels_P;
  const void* panels[kGemmPanels];
  for (std::int64_t p = 0; p < kGemmPanels; ++p) {
    panels_P.emplace_back(panel_bytes(n));
    panels[p] = panels_P.back().data();
    std::memset(panels_P.back().data(), 0xff, static_cast<std::size_t>(panel_bytes(n)));
    table.panel[d](product->rows + p * kPanelRows, n, panels_P.back().data());
  }
  for (std::int64_t t = 0; t < Product::kMost; ++t)
    for (std::int64_t p = 0; p < kGemmPanels; ++p)
      table.gemm[d](panels + p, 1, product->inputs_T + t, 1, n, &product->alone[t * Product::kRows + p * kPanelRows],
                    0);
  for (const std::int64_t tokens : {1, 2, 3, 6, 7, 8, 9, 17}) {
    for (std::int64_t count = 1; count <= kGemmPanels; ++count) {
      const std::int64_t width = count * kPanelRows, ldo = width + 3;
      const Guarded out(((tokens - 1) * ldo + width) * 4);
      std::memset(out.data(), 0, static_cast<std::size_t>(out.size()));
      table.gemm[d](panels, count, product->inputs_T, tokens, n, out.as<float>(), ldo);
      for (std::int64_t t = 0; t < tokens; ++t) {
        const float* row = out.as<float>() + t * ldo;
        PI2_CHECK(std::memcmp(row, &product->alone[t * Product::kRows], static_cast<std::size_t>(width) * 4) == 0,
                  "%s dtype %d n %ld gemm, %ld panels, %ld tokens: bits of token %ld differ from it alone", table.isa,
                  d, static_cast<long>(n), static_cast<long>(count), static_cast<long>(tokens), static_cast<long>(t));
        PI2_CHECK(t + 1 == tokens || (row[width] == 0 && row[width + 1] == 0 && row[width + 2] == 0),
                  "%s gemm wrote between rows of out", table.isa);
      }
    }
  }
}

// Where an instruction set has panels, blocks give what they give.
long check_products(const KernelTable& table, DType dtype, std::int64_t n, std::mt19937& rng) {
  const int d = static_cast<int>(dtype);
  const bool gemm = table.gemm[d] != nullptr, blocks = table.dot_blocks[d] != nullptr;
  PI2_CHECK((table.panel[d] != nullptr) == gemm && (table.prepare_gemm[d] != nullptr) == (gemm || blocks) &&
                (blocks || !gemm || is_ggml(dtype)),
            "%s has a part of gemm or of dot_blocks for dtype %d", table.isa, d);
  if (!gemm && !blocks) return 0;
  Product product(table, dtype, n, rng);
  if (gemm) check_gemm(&product);
  if (blocks && in_blocks(kPanelRows, n)) {
    const std::vector<char> made = blocks_of(product);
    for (std::int64_t t = 0; !gemm && t < Product::kMost; ++t)
      table.dot_blocks[d](made.data(), kGemmPanels, product.inputs_T + t, 1, n, &product.alone[t * Product::kRows], 0);
    check_blocks(product);
    if (table.dot_lanes[d] != nullptr) check_lanes(product);
  }
  if (gemm || in_blocks(kPanelRows, n)) product.check_alone();
  return Product::kMost + 16;
}

long check_axpy(const KernelTable& table, DType dtype, std::int64_t n, std::mt19937& rng) {
  const AxpyFn axpy = table.axpy[static_cast<int>(dtype)];
  const RestoreFn restore = table.restore[static_cast<int>(dtype)];
  PI2_CHECK(axpy != nullptr && restore != nullptr, "%s dtype %d", table.isa, static_cast<int>(dtype));
  if (axpy == nullptr || restore == nullptr) return 0;
  std::vector<std::vector<double>> weights;
  std::vector<Guarded> rows_R;
  const void* rows[kAxpyRows];
  for (std::int64_t r = 0; r < kAxpyRows; ++r) {
    const std::vector<char> row = quantized_row(rng, dtype, n);
    weights.push_back(weights_of(row, dtype, n));
    rows_R.emplace_back(row.data(), static_cast<std::int64_t>(row.size()));
    rows[r] = rows_R.back().data();
  }
  for (std::int64_t count = 1; count <= kAxpyRows; ++count) {
    std::vector<float> h = floats(rng, kAxpyRows);
    if (count == 2) h[1] = 1e-39f;
    if (count == 3) h[0] = 0;
    const Guarded together(padded(n) * 4), one_by_one(padded(n) * 4), out(n * 4);  // fresh pages are zero
    for (int twice = 0; twice < 2; ++twice) {
      axpy(together.as<float>(), rows, h.data(), count, n, rows);
      for (std::int64_t r = 0; r < count; ++r) axpy(one_by_one.as<float>(), rows + r, h.data() + r, 1, n, nullptr);
    }
    PI2_CHECK(std::memcmp(together.data(), one_by_one.data(), static_cast<std::size_t>(together.size())) == 0,
              "%s dtype %d n %ld count %ld: rows together differ from one by one", table.isa, static_cast<int>(dtype),
              static_cast<long>(n), static_cast<long>(count));
    restore(together.as<float>(), n, out.as<float>());
    for (std::int64_t k = 0; k < n; ++k) {
      double sum = 0, magnitude = 0;
      for (std::int64_t r = 0; r < count; ++r) {
        sum += 2 * h[r] * weights[r][k];
        magnitude += 2 * std::fabs(h[r] * weights[r][k]);
      }
      // The second term: h times a scale is rounded to a subnormal and then multiplied by up to 128.
      PI2_CHECK(std::fabs(out.as<float>()[k] - sum) <= 1e-6 * magnitude + 1e-42, "%s dtype %d n %ld: %g, wanted %g",
                table.isa, static_cast<int>(dtype), static_cast<long>(n), out.as<float>()[k], sum);
    }
    h[0] = NAN;
    axpy(together.as<float>(), rows, h.data(), 1, n, nullptr);
    restore(together.as<float>(), n, out.as<float>());
    PI2_CHECK(std::all_of(out.as<float>(), out.as<float>() + n, [](float v) { return std::isnan(v); }),
              "%s dtype %d n %ld: NaN is lost", table.isa, static_cast<int>(dtype), static_cast<long>(n));
  }
  return kAxpyRows;
}

// Broken weights are named, the first of several whatever the threads; sound ones are taken.
long check_refusals(std::mt19937& rng) {
  constexpr std::int64_t kRows = 100, kColumns = 77;
  const std::vector<float> sound = floats(rng, kRows * kColumns);
  ThreadPool pool(3);
  long cases = 0;
  for (const DType to : {DType::kQ4, DType::kQ8}) {
    std::vector<char> rows(static_cast<std::size_t>(kRows * row_bytes(to, kColumns)));
    const auto fault = [&](const std::vector<float>& w) {
      return quantize(w.data(), DType::kF32, kRows, kColumns, to, rows.data(), pool.parallel());
    };
    PI2_CHECK(!fault(sound).found, "sound weights are refused");
    const float most = largest_weight(to);
    for (const float bad :
         {NAN, INFINITY, -INFINITY, std::nextafter(most, INFINITY), -std::nextafter(most, INFINITY)}) {
      std::vector<float> w = sound;
      for (const std::size_t place : {50 * kColumns + 76, 51 * kColumns, 99 * kColumns + 3}) w[place] = bad;
      const QuantizeFault found = fault(w);
      PI2_CHECK(
          found.found && found.row == 50 && found.column == 76 && std::memcmp(&found.value, &bad, sizeof(bad)) == 0,
          "%g: found %d row %ld column %ld value %g", bad, found.found, static_cast<long>(found.row),
          static_cast<long>(found.column), found.value);
      ++cases;
    }
    std::vector<float> w = sound;
    w[5] = -most;
    PI2_CHECK(!fault(w).found, "the largest weight is refused");
    for (const double value : weights_of({rows.begin(), rows.begin() + row_bytes(to, kColumns)}, to, kColumns))
      PI2_CHECK(std::isfinite(value) && std::fabs(value) <= most, "%g beside the largest weight", value);
  }
  return cases;
}

}  // namespace

int main() {
  std::mt19937 rng(3);
  long cases = check_refusals(rng);
  int count = 0;
  const KernelTable* const* tables = available_kernels(&count);
  for (int i = first_of(count); i < count; ++i) {
    for (const DType dtype : {DType::kQ4, DType::kQ8}) {
      for (const std::int64_t n : kSizes) {
        for (const bool a8 : {false, true}) {
          const Kernels kernels(*tables[i], dtype, a8);
          if (kernels.missing()) continue;
          cases += check_dot(kernels, n, rng) + check_broken(kernels, n, rng);
        }
        cases += check_axpy(*tables[i], dtype, n, rng) + check_products(*tables[i], dtype, n, rng);
      }
    }
    for (const DType dtype : kGgml) {
      for (const std::int64_t blocks : {1, 2, 3, 4, 5, 8, 13}) {
        for (const bool a8 : {false, true}) {
          const Kernels kernels(*tables[i], dtype, a8);
          if (kernels.missing()) continue;
          const std::int64_t n = blocks * ggml_block(dtype).numbers;
          cases += check_dot(kernels, n, rng) + check_broken(kernels, n, rng);
        }
        cases += check_products(*tables[i], dtype, blocks * ggml_block(dtype).numbers, rng);
        if (dtype == DType::kTQ2) cases += check_axpy(*tables[i], dtype, blocks * ggml_block(dtype).numbers, rng);
      }
    }
    std::printf("tested %s\n", tables[i]->isa);
  }
  return finish("test_quantized", cases);
}
