// Every kernel of every instruction set this CPU has, against sums in double; the table comes from kernels/list.inc, so
// a new kernel is tested without touching this file. Also: the bits of a token do not depend on its company.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/convert.h"
#include "pi2/attention.h"
#include "pi2/kernels.h"
#include "tests/check.h"
#include "tests/guarded.h"
#include "tests/random.h"

namespace {

using pi2::AttendArgs;
using pi2::DType;
using namespace pi2_test;

constexpr std::int64_t kSizes[] = {1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 111, 128, 129, 257, 989, 1024};
const DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kI8};

long check_dot(const pi2::KernelTable& table, DType dtype, std::mt19937& rng) {
  long cases = 0;
  const pi2::DotFn dot = table.dot[static_cast<int>(dtype)];
  PI2_CHECK(dot != nullptr, "%s has no dot for dtype %d", table.isa, static_cast<int>(dtype));
  if (dot == nullptr) return 0;
  for (const std::int64_t n : kSizes) {
    for (const std::int64_t tokens : {1, 2, 3, 4, 5, 9}) {
      for (std::int64_t count = 1; count <= pi2::kDotRows; ++count) {
        const std::int64_t ldx = n + 3, bytes = pi2::row_bytes(dtype, 1);
        const std::vector<char> weights = stored(rng, dtype, pi2::kDotRows * n);
        const Guarded first(weights.data(), n * bytes), second(weights.data() + n * bytes, n * bytes);
        const Guarded third(weights.data() + 2 * n * bytes, n * bytes), last(weights.data() + 3 * n * bytes, n * bytes);
        const std::vector<float> x = floats(rng, tokens * ldx);
        // aligned to nothing unless n is
        const void* rows[pi2::kDotRows] = {first.data(), second.data(), third.data(), last.data()};
        std::vector<const void*> x_T;
        for (std::int64_t t = 0; t < tokens; ++t) x_T.push_back(x.data() + t * ldx);
        std::vector<float> out(static_cast<std::size_t>(count * tokens), NAN);
        dot(rows, count, x_T.data(), tokens, n, out.data(), rows);
        for (std::int64_t r = 0; r < count; ++r) {
          for (std::int64_t t = 0; t < tokens; ++t) {
            double sum = 0, magnitude = 0;
            for (std::int64_t k = 0; k < n; ++k) {
              const double product = static_cast<double>(pi2::load_float(rows[r], dtype, k)) * x[t * ldx + k];
              sum += product;
              magnitude += std::fabs(product);
            }
            const float found = out[r * tokens + t];
            PI2_CHECK(std::fabs(found - sum) <= 1e-6 * magnitude + 1e-30, "%s dtype %d n %ld: %g, wanted %g", table.isa,
                      static_cast<int>(dtype), static_cast<long>(n), found, sum);
            float alone = NAN;
            dot(&rows[r], 1, &x_T[t], 1, n, &alone, nullptr);
            PI2_CHECK(std::memcmp(&alone, &found, sizeof(float)) == 0,
                      "%s dtype %d n %ld tokens %ld: bits differ alone", table.isa, static_cast<int>(dtype),
                      static_cast<long>(n), static_cast<long>(tokens));
            ++cases;
          }
        }
      }
    }
  }
  return cases;
}

long check_axpy(const pi2::KernelTable& table, DType dtype, std::mt19937& rng) {
  long cases = 0;
  const pi2::AxpyFn axpy = table.axpy[static_cast<int>(dtype)];
  PI2_CHECK(axpy != nullptr, "%s has no axpy for dtype %d", table.isa, static_cast<int>(dtype));
  if (axpy == nullptr) return 0;
  for (const std::int64_t n : kSizes) {
    for (std::int64_t count = 1; count <= pi2::kAxpyRows; ++count) {
      const std::int64_t bytes = pi2::row_bytes(dtype, 1);
      const std::vector<char> weights = stored(rng, dtype, pi2::kAxpyRows * n + 1);
      const std::vector<float> h = floats(rng, pi2::kAxpyRows);
      const void* rows[pi2::kAxpyRows];
      for (std::int64_t r = 0; r < pi2::kAxpyRows; ++r) rows[r] = weights.data() + (r * n + 1) * bytes;
      std::vector<float> start = floats(rng, n + 1);
      start[n] = 42;  // must not be touched
      std::vector<float> together = start, one_by_one = start;
      axpy(together.data(), rows, h.data(), count, n, rows);
      for (std::int64_t r = 0; r < count; ++r) axpy(one_by_one.data(), rows + r, h.data() + r, 1, n, nullptr);
      PI2_CHECK(std::memcmp(together.data(), one_by_one.data(), static_cast<std::size_t>(n) * sizeof(float)) == 0,
                "%s dtype %d n %ld count %ld: rows together differ from one by one", table.isa, static_cast<int>(dtype),
                static_cast<long>(n), static_cast<long>(count));
      PI2_CHECK(together[n] == 42, "%s wrote past the end", table.isa);
      for (std::int64_t k = 0; k < n; ++k) {
        double sum = start[k], magnitude = std::fabs(start[k]);
        for (std::int64_t r = 0; r < count; ++r) {
          const double product = static_cast<double>(h[r]) * pi2::load_float(rows[r], dtype, k);
          sum += product;
          magnitude += std::fabs(product);
        }
        PI2_CHECK(std::fabs(together[k] - sum) <= 1e-6 * magnitude, "%s dtype %d: %g, wanted %g", table.isa,
                  static_cast<int>(dtype), together[k], sum);
      }
      ++cases;
    }
  }
  return cases;
}

long check_addmm(const pi2::KernelTable& table, std::mt19937& rng) {
  long cases = 0;
  PI2_CHECK(table.addmm != nullptr, "%s has no addmm", table.isa);
  constexpr std::int64_t kFirst = 5;
  for (const std::int64_t width : {1, 7, 15, 16, 17, 31, 64, 111, 128, 257}) {
    for (const std::int64_t tokens : {1, 2, 5, 6, 7, 13}) {
      for (const std::int64_t count : {1, 3, 16, 33}) {
        const std::int64_t ldw = kFirst + width + 3, end = kFirst + width;
        const Guarded w(floats(rng, count * ldw).data(), (count * ldw - 3) * 4);
        std::vector<std::vector<float>> start, found;
        std::vector<Guarded> h;
        std::vector<const float*> h_T;
        std::vector<float*> y_T;
        for (std::int64_t t = 0; t < tokens; ++t) {
          h.emplace_back(floats(rng, count).data(), count * 4);
          start.push_back(floats(rng, end + 1));
        }
        found = start;
        for (std::int64_t t = 0; t < tokens; ++t) {
          h_T.push_back(h[t].as<float>());
          y_T.push_back(found[t].data());
        }
        table.addmm(h_T.data(), w.as<float>(), ldw, count, kFirst, width, y_T.data(), tokens);
        for (std::int64_t t = 0; t < tokens; ++t) {
          std::vector<float> alone = start[t];
          float* y = alone.data();
          table.addmm(&h_T[t], w.as<float>(), ldw, count, kFirst, width, &y, 1);
          PI2_CHECK(alone == found[t], "%s addmm %ld x %ld x %ld: token %ld differs alone", table.isa,
                    static_cast<long>(tokens), static_cast<long>(count), static_cast<long>(width),
                    static_cast<long>(t));
          for (std::int64_t c = 0; c <= end; ++c) {
            double sum = start[t][c], magnitude = std::fabs(sum);
            for (std::int64_t i = 0; i < (c < kFirst || c == end ? 0 : count); ++i) {
              const double product = static_cast<double>(h_T[t][i]) * w.as<float>()[i * ldw + c];
              sum += product;
              magnitude += std::fabs(product);
            }
            const bool inside = c >= kFirst && c < end;
            PI2_CHECK(std::fabs(alone[c] - sum) <= (inside ? 2e-6 * magnitude : 0), "%s addmm at %ld: %g, wanted %g",
                      table.isa, static_cast<long>(c), alone[c], sum);
          }
        }
        ++cases;
      }
    }
  }
  return cases;
}

long check_read(const pi2::KernelTable& table, std::mt19937& rng) {
  long cases = 0;
  PI2_CHECK(table.read != nullptr, "%s has no read", table.isa);
  for (const std::int64_t n : kSizes) {
    std::vector<char> data = stored(rng, DType::kI8, n);
    const std::uint64_t before = table.read(data.data(), n);
    data[rng() % static_cast<unsigned>(n)] ^= 1;
    PI2_CHECK(table.read(data.data(), n) != before, "%s read does not see every byte of %ld", table.isa,
              static_cast<long>(n));
    ++cases;
  }
  return cases;
}

long check_signs(const pi2::KernelTable& table, std::mt19937& rng) {
  long cases = 0;
  PI2_CHECK(table.count_signs != nullptr, "%s has no count_signs", table.isa);
  for (const std::int64_t words : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 64, 65}) {
    constexpr std::int64_t kRows = 3;
    const Guarded rows(stored(rng, DType::kI8, kRows * words * 8).data(), kRows * words * 8);
    const Guarded x(stored(rng, DType::kI8, words * 8).data(), words * 8);
    const Guarded out(kRows * 4);
    std::memset(rows.data(), 0xff, static_cast<std::size_t>(words * 8));  // and a row that differs everywhere from zero
    for (const bool zero : {false, true}) {
      if (zero) std::memset(x.data(), 0, static_cast<std::size_t>(words * 8));
      table.count_signs(rows.data(), kRows, x.data(), words, out.as<std::int32_t>());
      for (std::int64_t r = 0; r < kRows; ++r) {
        std::int32_t wanted = 0;
        for (std::int64_t bit = 0; bit < words * 64; ++bit)
          wanted += ((rows.data()[r * words * 8 + bit / 8] ^ x.data()[bit / 8]) >> (bit % 8)) & 1;
        PI2_CHECK(out.as<std::int32_t>()[r] == wanted, "%s %ld words: %d signs differ, wanted %d", table.isa,
                  static_cast<long>(words), out.as<std::int32_t>()[r], wanted);
      }
      ++cases;
    }
  }
  return cases;
}

// The room of one call, and what is done in it.
struct Attending {
  AttendArgs a;
  std::vector<float> q, scores, unpacked, max, sum, y;
  std::vector<std::uint64_t> mask;

  Attending(const Guarded& key, const Guarded& value, DType dtype, std::int64_t tokens, std::int64_t group,
            std::int64_t width, std::int64_t words) {
    const std::int64_t rows = tokens * group, ld = (width + pi2::kAttendPad - 1) / pi2::kAttendPad * pi2::kAttendPad;
    const std::int64_t stride = pi2::kv_row_bytes(dtype, width);
    q.resize(rows * ld);
    scores.resize(rows * pi2::kAttendWord, NAN);
    if (dtype == DType::kQ4) unpacked.resize(pi2::kAttendWord * pi2::groups(width) * pi2::kGroup, NAN);
    max.resize(rows, -INFINITY);
    sum.resize(rows);
    y.resize(rows * ld);
    mask.resize(tokens * words);
    a = {nullptr, tokens, group, width, ld, key.data(), value.data(), stride, stride, nullptr, words, 0, words, 0.3f};
  }
  void run(pi2::AttendFn attend) {
    a.q = q.data();
    a.mask = mask.data();
    a.scores = scores.data();
    a.unpacked = unpacked.data();
    a.max = max.data();
    a.sum = sum.data();
    a.y = y.data();
    attend(a);
  }
  bool sees(std::int64_t t, std::int64_t i) const { return (mask[t * a.words + i / 64] >> (i % 64) & 1) != 0; }
};

void check_row(const Attending& all, const pi2::KernelTable& table, DType dtype, std::int64_t r, std::int64_t length) {
  const AttendArgs& a = all.a;
  std::vector<double> scores, wanted(a.width), magnitude(a.width);
  double top = -INFINITY, total = 0;
  for (std::int64_t i = 0; i < length; ++i) {
    double score = 0;
    for (std::int64_t k = 0; k < a.width; ++k)
      score += static_cast<double>(all.q[r * a.ld + k]) * kv_number(a.key + i * a.key_stride, dtype, a.width, k);
    score = a.softcap == 0 ? score * a.scale : a.softcap * std::tanh(score * a.scale / a.softcap);
    scores.push_back(all.sees(r / a.group, i) ? score : -INFINITY);
    top = std::max(top, scores.back());
  }
  for (std::int64_t i = 0; i < length; ++i) {
    if (!all.sees(r / a.group, i)) continue;
    total += std::exp(scores[i] - top);
    for (std::int64_t k = 0; k < a.width; ++k) {
      const double add = std::exp(scores[i] - top) * kv_number(a.value + i * a.value_stride, dtype, a.width, k);
      wanted[k] += add;
      magnitude[k] += std::fabs(add);
    }
  }
  PI2_CHECK(std::fabs(all.sum[r] - total) <= 4e-6 * total, "%s attend: sum %g, wanted %g", table.isa, all.sum[r],
            total);
  for (std::int64_t k = 0; k < a.width; ++k)
    PI2_CHECK(std::fabs(all.y[r * a.ld + k] - wanted[k]) <= 4e-6 * magnitude[k] + 1e-30,
              "%s attend dtype %d width %ld: %g, wanted %g", table.isa, static_cast<int>(dtype),
              static_cast<long>(a.width), all.y[r * a.ld + k], wanted[k]);
}

// Keys and values end with the last position that is seen; each token sees some before it, with holes.
long check_attend(const pi2::KernelTable& table, DType dtype, std::mt19937& rng) {
  long cases = 0;
  const pi2::AttendFn attend = table.attend[static_cast<int>(dtype)];
  PI2_CHECK(attend != nullptr, "%s has no attend for dtype %d", table.isa, static_cast<int>(dtype));
  if (attend == nullptr) return 0;
  for (const std::int64_t width : {1, 8, 13, 40, 64, 128}) {
    for (const std::int64_t length : {1, 3, 64, 66, 150}) {
      for (const std::int64_t group : {1, 3, 4, 7}) {
        const std::int64_t tokens = std::min<std::int64_t>(3, length), bytes = length * pi2::kv_row_bytes(dtype, width);
        const Guarded key(kv_rows(rng, dtype, length, width).data(), bytes),
            value(kv_rows(rng, dtype, length, width).data(), bytes);
        Attending all(key, value, dtype, tokens, group, width, (length + 63) / 64);
        for (std::int64_t t = 0; t < tokens; ++t)
          for (std::int64_t i = 0; i <= length - tokens + t; ++i)
            if (i % 11 != 5 || i + 1 == length) all.mask[t * all.a.words + i / 64] |= std::uint64_t{1} << (i % 64);
        for (std::int64_t r = 0; r < tokens * group; ++r)
          for (std::int64_t k = 0; k < width; ++k) all.q[r * all.a.ld + k] = normal(rng);
        all.a.softcap = length == 66 ? 2 : 0;
        all.run(attend);
        for (std::int64_t r = 0; r < tokens * group; ++r) check_row(all, table, dtype, r, length);
        for (std::int64_t t = 0; t < tokens; ++t) {
          Attending alone(key, value, dtype, 1, group, width, all.a.words);
          alone.q.assign(all.q.begin() + t * group * all.a.ld, all.q.begin() + (t + 1) * group * all.a.ld);
          alone.mask.assign(all.mask.begin() + t * all.a.words, all.mask.begin() + (t + 1) * all.a.words);
          alone.a.softcap = all.a.softcap;
          alone.run(attend);
          PI2_CHECK(std::equal(alone.y.begin(), alone.y.end(), all.y.begin() + t * group * all.a.ld) &&
                        std::equal(alone.sum.begin(), alone.sum.end(), all.sum.begin() + t * group),
                    "%s attend dtype %d width %ld length %ld: token %ld differs alone", table.isa,
                    static_cast<int>(dtype), static_cast<long>(width), static_cast<long>(length), static_cast<long>(t));
        }
        ++cases;
      }
    }
  }
  return cases;
}

// PI2_TEST_ISAS names what this CPU must be found to have, in order: where the CPU is known, as in an emulator.
void check_available(const pi2::KernelTable* const* tables, int count) {
  std::string found;
  for (int i = 0; i < count; ++i) found += (i == 0 ? "" : ",") + std::string(tables[i]->isa);
  const char* wanted = std::getenv("PI2_TEST_ISAS");
  PI2_CHECK(wanted == nullptr || found == wanted, "found %s, wanted %s", found.c_str(), wanted);
}

long check_convert() {
  long cases = 0;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float f16 = pi2::F16::widen(half), bf16 = pi2::BF16::widen(half);
    if (!std::isnan(f16)) PI2_CHECK(pi2::narrow_f16(f16) == half, "fp16 %04x does not come back", bits);
    if (!std::isnan(bf16)) PI2_CHECK(pi2::narrow_bf16(bf16) == half, "bf16 %04x does not come back", bits);
    if (std::isnan(f16)) PI2_CHECK(std::isnan(pi2::F16::widen(pi2::narrow_f16(f16))), "fp16 NaN %04x is lost", bits);
    if (std::isnan(bf16))
      PI2_CHECK(std::isnan(pi2::BF16::widen(pi2::narrow_bf16(bf16))), "bf16 NaN %04x is lost", bits);
    ++cases;
  }
  return cases;
}

}  // namespace

int main() {
  std::mt19937 rng(1);
  long cases = check_convert();
  int count = 0;
  const pi2::KernelTable* const* tables = pi2::available_kernels(&count);
  check_available(tables, count);
  for (int i = first_of(count); i < count; ++i) {
    for (const DType dtype : kTypes) {
      cases += check_dot(*tables[i], dtype, rng);
      if (dtype != DType::kI8) cases += check_axpy(*tables[i], dtype, rng);
      cases += check_attend(*tables[i], dtype, rng);
    }
    cases += check_attend(*tables[i], DType::kQ4, rng);
    cases += check_addmm(*tables[i], rng) + check_read(*tables[i], rng) + check_signs(*tables[i], rng);
    std::printf("tested %s\n", tables[i]->isa);
  }
  return finish("test_kernels", cases);
}
