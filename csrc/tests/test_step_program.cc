// Programs of a step: numbers against plain arithmetic, and code that is not sound, which is refused or stays within
// its slots: their memory ends where that of the process does.
#include "pi2/step_program.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "base/convert.h"
#include "pi2/thread_pool.h"
#include "step/elementwise.h"
#include "tests/check.h"
#include "tests/guarded.h"
#include "tests/random.h"

namespace {

using pi2::Element;
using pi2::StepOp;
using pi2::StepProgram;
using namespace pi2_test;
using Sizes = std::vector<std::int64_t>;

std::int64_t bits(double value) {
  std::int64_t word;
  std::memcpy(&word, &value, sizeof(word));
  return word;
}

struct Code {
  Sizes words;

  Code& begin(StepOp op, std::int64_t operands, std::int64_t parameters) {
    words.insert(words.end(), {static_cast<std::int64_t>(op), operands, parameters});
    return *this;
  }
  Code& operand(std::int64_t slot, std::int64_t offset, Element element, const Sizes& sizes, const Sizes& strides) {
    words.insert(words.end(),
                 {slot, offset, static_cast<std::int64_t>(element), static_cast<std::int64_t>(sizes.size())});
    words.insert(words.end(), sizes.begin(), sizes.end());
    words.insert(words.end(), strides.begin(), strides.end());
    return *this;
  }
  Code& plain(std::int64_t slot, const Sizes& sizes, Element element = Element::kF32) {
    Sizes strides(sizes.size(), 1);
    for (std::size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * sizes[d];
    return operand(slot, 0, element, sizes, strides);
  }
  Code& parameter(std::int64_t word) {
    words.push_back(word);
    return *this;
  }
};

void call(void*, std::int64_t, Element element, const void* x, void* y, std::int64_t count) {
  std::memcpy(y, x, static_cast<std::size_t>(count * pi2::element_bytes(element)));
}

// A norm, a rotation of halves, a write to a cache, a linear layer and attention. Slots: 0 x [2, 32], 1 cache [1, 1, 5,
// 32], 2 positions [2], 3 rows of a linear layer [32, row_bytes(32)], 4 result [1, 2, 1, 32], 5 to 8 own.
Code whole_program() {
  constexpr auto kQ8 = static_cast<std::int64_t>(pi2::DType::kQ8);
  Code code;
  code.begin(StepOp::kSquare, 2, 0).plain(5, {2, 32}).plain(0, {2, 32});
  code.begin(StepOp::kMean, 2, 0).plain(6, {2, 1}).plain(5, {2, 32});
  code.begin(StepOp::kAdd, 2, 1).plain(6, {2, 1}).plain(6, {2, 1}).parameter(bits(1e-6));
  code.begin(StepOp::kRsqrt, 2, 0).plain(6, {2, 1}).plain(6, {2, 1});
  code.begin(StepOp::kMul, 3, 0).plain(7, {2, 32}).plain(0, {2, 32}).operand(6, 0, Element::kF32, {2, 32}, {1, 0});
  code.begin(StepOp::kNeg, 2, 0);
  code.operand(5, 0, Element::kF32, {2, 16}, {32, 1}).operand(7, 64, Element::kF32, {2, 16}, {32, 1});
  code.begin(StepOp::kCopy, 2, 0);
  code.operand(5, 64, Element::kF32, {2, 16}, {32, 1}).operand(7, 0, Element::kF32, {2, 16}, {32, 1});
  code.begin(StepOp::kLinear, 3, 3).plain(8, {2, 32}).plain(5, {2, 32});
  code.plain(3, {32, pi2::row_bytes(pi2::DType::kQ8, 32)}, Element::kByte).parameter(kQ8).parameter(1).parameter(0);
  code.begin(StepOp::kCall, 2, 1).plain(7, {2, 32}).plain(8, {2, 32}).parameter(0);
  code.begin(StepOp::kIndexCopy, 3, 1).plain(1, {1, 1, 5, 32}).plain(7, {1, 1, 2, 32});
  code.plain(2, {2}, Element::kI64).parameter(2);
  code.begin(StepOp::kAttention, 4, 5).plain(4, {1, 2, 1, 32}).plain(7, {1, 1, 2, 32});
  code.plain(1, {1, 1, 5, 32})
      .plain(1, {1, 1, 5, 32})
      .parameter(bits(0.2))
      .parameter(0)
      .parameter(0)
      .parameter(0)
      .parameter(0);
  return code;
}

Sizes slot_bytes() { return {256, 640, 16, 32 * pi2::row_bytes(pi2::DType::kQ8, 32), 256, 256, 8, 256, 256}; }

struct Memory {
  std::vector<Guarded> slots;
  std::vector<char*> given;

  explicit Memory(std::mt19937& rng) {
    const Sizes bytes = slot_bytes();
    for (std::size_t s = 0; s < 5; ++s) {
      std::vector<char> start(static_cast<std::size_t>(bytes[s]));
      if (s == 3) {
        const std::vector<float> w = floats(rng, 32 * 32);
        pi2::quantize(w.data(), pi2::DType::kF32, 32, 32, pi2::DType::kQ8, start.data(), pi2::serial());
      } else if (s == 2) {
        const std::int64_t at[] = {3, -5};
        std::memcpy(start.data(), at, sizeof(at));
      } else {
        std::memcpy(start.data(), floats(rng, bytes[s] / 4).data(), start.size());
      }
      slots.emplace_back(start.data(), bytes[s]);
    }
    for (Guarded& slot : slots) given.push_back(slot.data());
  }
};

std::unique_ptr<StepProgram> make(const Sizes& code, std::string* reason) {
  return StepProgram::make(code.data(), static_cast<std::int64_t>(code.size()), slot_bytes(), 5, 1, reason);
}

void computes(std::mt19937& rng) {
  Memory memory(rng);
  std::string reason;
  const auto program = make(whole_program().words, &reason);
  PI2_CHECK(program != nullptr, "%s", reason.c_str());
  if (program == nullptr) return;
  std::vector<float> before(160);
  std::memcpy(before.data(), memory.given[1], 640);
  pi2::ThreadPool pool(2);
  PI2_CHECK(program->run(memory.given, pool.parallel(), call, nullptr), "an index is out of range");
  const auto* x = reinterpret_cast<const float*>(memory.given[0]);
  const auto* cache = reinterpret_cast<const float*>(memory.given[1]);
  const auto* result = reinterpret_cast<const float*>(memory.given[4]);
  std::vector<float> w(32 * 32);
  pi2::dequantize(memory.given[3], pi2::DType::kQ8, 32, 32, pi2::row_bytes(pi2::DType::kQ8, 32), w.data(),
                  pi2::DType::kF32, pi2::serial());
  for (int t = 0; t < 2; ++t) {
    double square = 0;
    for (int k = 0; k < 32; ++k) square += x[t * 32 + k] * x[t * 32 + k];
    const double scale = 1 / std::sqrt(square / 32 + 1e-6);
    for (int n = 0; n < 32; ++n) {
      double sum = 0;
      for (int k = 0; k < 32; ++k) sum += w[n * 32 + k] * (k < 16 ? -scale : scale) * x[t * 32 + (k + 16) % 32];
      const float written = cache[(t == 0 ? 3 : 0) * 32 + n];
      PI2_CHECK(std::fabs(written - sum) < 0.4, "token %d, row %d: %g, not %g", t, n, written, sum);
      PI2_CHECK(std::fabs(result[t * 32 + n]) <= 40, "attention: %g", result[t * 32 + n]);
    }
  }
  for (int p : {1, 2, 4})
    for (int n = 0; n < 32; ++n) PI2_CHECK(cache[p * 32 + n] == before[p * 32 + n], "position %d was written", p);
  const std::int64_t beyond[] = {5, 0};
  std::memcpy(memory.given[2], beyond, sizeof(beyond));
  PI2_CHECK(!program->run(memory.given, pool.parallel(), call, nullptr), "wrote beyond the cache");
}

// Its order of sums is compared with PyTorch's in tests/decode/test_step_program.py.
void means(std::mt19937& rng) {
  for (std::int64_t n : {1, 7, 8, 9, 31, 32, 100, 480}) {
    const std::vector<float> x = floats(rng, n);
    double sum = 0;
    for (const float value : x) sum += value;
    PI2_CHECK(std::fabs(pi2::mean_of(x.data(), n) - sum / n) < 1e-6, "the mean of %ld", static_cast<long>(n));
  }
}

void refuses_or_stays_within(std::mt19937& rng, long* cases) {
  const Sizes sound = whole_program().words;
  long kept = 0;
  for (int i = 0; i < (kThreadSanitizer ? 200 : 20000); ++i, ++*cases) {
    Sizes code = sound;
    for (int change = 0; change <= i % 3; ++change) {
      const auto at = static_cast<std::size_t>(rng() % code.size());
      const std::int64_t odd[] = {0,
                                  1,
                                  -1,
                                  4,
                                  31,
                                  33,
                                  1 << 20,
                                  std::numeric_limits<std::int64_t>::max(),
                                  std::numeric_limits<std::int64_t>::min(),
                                  code[at] ^ 1,
                                  code[at] ^ 2,
                                  code[at] ^ 12};
      code[at] = odd[rng() % (sizeof(odd) / sizeof(odd[0]))];
    }
    if (i % 7 == 0) code.resize(rng() % code.size());
    std::string reason;
    const auto program = make(code, &reason);
    if (program == nullptr) continue;
    Memory memory(rng);
    program->run(memory.given, pi2::serial(), call, nullptr);
    ++kept;
  }
  PI2_CHECK(kept > *cases / 100, "hardly any changed program is sound: %ld", kept);
}

}  // namespace

int main() {
  std::mt19937 rng(1);
  long cases = 0;
  for (int i = 0; i < 20; ++i, ++cases) computes(rng);
  means(rng);
  refuses_or_stays_within(rng, &cases);
  return finish("step_program", cases);
}
