// The superblock's parser: what it takes, and what it refuses by name.
#include <functional>

#include "tests/store_fixture.h"

namespace {

using namespace pi2;
using namespace pi2_test;

long check_crc() {
  // The check value of the catalogue of CRC algorithms, and every length around a word.
  PI2_CHECK(crc32c("123456789", 9) == 0xe3069283u, "%08x", crc32c("123456789", 9));
  std::mt19937 rng(1);
  const std::vector<char> data = stored(rng, DType::kI8, 4100);
  long cases = 1;
  for (std::size_t n = 0; n < 70; ++n, ++cases)
    PI2_CHECK(crc32c(data.data() + n % 5, n) == crc32c_by_table(data.data() + n % 5, n), "%zu bytes", n);
  PI2_CHECK(crc32c(data.data(), 4100) == crc32c_by_table(data.data(), 4100), "4100 bytes");
  for (std::size_t n : {0, 1, 9, 4096, 4100})  // in two pieces, by both ways
    for (const auto one : {crc32c, crc32c_by_table})
      PI2_CHECK(one(data.data() + n, 4100 - n, one(data.data(), n, 0)) == crc32c(data.data(), 4100), "%zu bytes", n);
  return cases + 1;
}

std::string opened(const StoreFixture& store, bool direct = false) {
  StoreFile file;
  return file.open(store.path, direct);
}

long check_sound(std::mt19937& rng) {
  const StoreFixture store(rng, 3, 70, 3, 100, DType::kQ4, 5);
  for (const bool direct : {false, true}) {
    StoreFile file;
    const std::string wrong = file.open(store.path, direct);
    PI2_CHECK(wrong.empty(), "%s", wrong.c_str());
    PI2_CHECK(file.layers().size() == 3, "%zu layers", file.layers().size());
    for (std::size_t l = 0; l < file.layers().size(); ++l) {
      const StoreLayer &found = file.layers()[l], &wanted = store.layers[l];
      PI2_CHECK(found.slots == wanted.slots && found.checks == wanted.checks && found.neurons == 70 &&
                    found.hidden == 100 && found.rows == 3 && found.w_dtype == DType::kQ4 &&
                    found.slot_bytes == wanted.slot_bytes && found.n_hot == 5 &&
                    found.number == static_cast<std::int64_t>(l),
                "layer %zu", l);
      PI2_CHECK(file.checks(static_cast<std::int64_t>(l))[7] ==
                    crc32c(&store.neuron_rows[l][static_cast<std::size_t>(7 * wanted.neuron_bytes())],
                           static_cast<std::size_t>(wanted.neuron_bytes())),
                "checksum of layer %zu", l);
    }
  }
  const DType int8 = DType::kQ8;
  for (const DType first : {DType::kQ4, DType::kQ6K}) {
    const StoreFixture pairs(rng, 2, 70, 3, 256, first, 0, 4, &int8);
    StoreFile file;
    const std::string wrong = file.open(pairs.path, false);
    PI2_CHECK(wrong.empty(), "%s", wrong.c_str());
    for (const StoreLayer& found : file.layers())
      PI2_CHECK(found.w_dtype == first && found.other_down && found.down_dtype == DType::kQ8 &&
                    found.neuron_bytes() == 2 * row_bytes(first, 256) + 272 && found.cluster == 4,
                "two formats");
  }
  return 8;
}

struct Damage {
  const char* message;
  std::function<void(StoreFixture*)> make;
  bool sealed = true;  // the superblock's checksum is made right again
};

void number(StoreFixture* s, std::size_t at, std::uint64_t value, std::size_t bytes) {
  put(&s->superblock, at, value, bytes);
}

long check_damage(std::mt19937& rng) {
  const std::uint64_t huge = ~std::uint64_t{0} & ~std::uint64_t{4095};
  const Damage cases[] = {
      {"no superblock where the data begins", [](StoreFixture* s) { s->superblock[0] = 'Q'; }},
      {"version 6 where this library knows 1 to 5", [](StoreFixture* s) { number(s, 8, 6, 4); }},
      {"version 0 where this library knows 1 to 5", [](StoreFixture* s) { number(s, 8, 0, 4); }},
      {"layer 0: chunks of 96 neurons, of which there are",
       [](StoreFixture* s) { number(s, 8, 4, 4), number(s, 128 + 48, 1, 4), number(s, 128 + 60, 96, 4); }},
      {"layer 0: clusters of 0 neurons", [](StoreFixture* s) { number(s, 8, 2, 4); }},
      {"layer 0: clusters of 3 neurons", [](StoreFixture* s) { number(s, 8, 2, 4), number(s, 128 + 48, 3, 4); }},
      {"layer 0: clusters of 128 neurons", [](StoreFixture* s) { number(s, 8, 2, 4), number(s, 128 + 48, 128, 4); }},
      {"layer 0: slots of 512 bytes for 4 neurons of",
       [](StoreFixture* s) { number(s, 8, 2, 4), number(s, 128 + 48, 4, 4); }},
      {"checksum does not match", [](StoreFixture* s) { s->superblock[300] ^= 1; }, false},
      {"checksum does not match", [](StoreFixture* s) { s->superblock[4000] ^= 1; }, false},
      {"checksum does not match", [](StoreFixture* s) { number(s, 16, 8192, 8); }},
      {"a superblock of", [](StoreFixture* s) { number(s, 16, ~std::uint64_t{0}, 8); }},
      {"bytes where the superblock says", [](StoreFixture* s) { s->file.resize(s->file.size() - 512); }},
      {"bytes where the superblock says", [](StoreFixture* s) { s->file.push_back(0); }},
      {"0 layers", [](StoreFixture* s) { number(s, 32, 0, 4); }},
      {"4000000000 layers", [](StoreFixture* s) { number(s, 32, 4000000000u, 4); }},
      {"pages of 512 bytes", [](StoreFixture* s) { number(s, 36, 512, 4); }},
      {"layer 1: weights of kind 3", [](StoreFixture* s) { number(s, 256 + 28, 3, 4); }},
      {"layer 1: weights of kind 9", [](StoreFixture* s) { number(s, 256 + 28, 9, 4); }},
      {"layer 1: weights of kind 77", [](StoreFixture* s) { number(s, 256 + 28, 77, 4); }},
      {"layer 0: 0 neurons", [](StoreFixture* s) { number(s, 128 + 16, 0, 4); }},
      {"layer 0: 70 neurons of 4 rows", [](StoreFixture* s) { number(s, 128 + 24, 4, 4); }},
      {"layer 0: rows of 72 bytes for 4294967295", [](StoreFixture* s) { number(s, 128 + 20, 0xffffffffu, 4); }},
      {"layer 0: slots of 100 bytes", [](StoreFixture* s) { number(s, 128 + 32, 100, 4); }},
      {"layer 0: slots of 700 bytes", [](StoreFixture* s) { number(s, 128 + 32, 700, 4); }},
      {"layer 0: 71 hot of 70 neurons", [](StoreFixture* s) { number(s, 128 + 40, 71, 4); }},
      {"layer 0: 70 slots of 512 bytes at 8193", [](StoreFixture* s) { number(s, 128, 8193, 8); }},
      {"layer 0: 70 slots of 512 bytes at 0", [](StoreFixture* s) { number(s, 128, 0, 8); }},
      {"layer 0: 70 slots of 512 bytes at", [=](StoreFixture* s) { number(s, 128, huge, 8); }},
      {"layer 0: 70 slots of 4294966784 bytes", [](StoreFixture* s) { number(s, 128 + 32, 0xfffffe00u, 4); }},
      {"layer 1: 70 checksums at", [=](StoreFixture* s) { number(s, 256 + 8, huge, 8); }},
      {"not on a page", [](StoreFixture* s) { put(&s->file, 0, 4000, 8); }},
      {"a header of", [=](StoreFixture* s) { put(&s->file, 0, huge, 8); }},
      {"3 bytes", [](StoreFixture* s) { s->file.resize(3); }},
  };
  // Of a store with q5_1 rows and down rows in int8.
  const Damage of_pairs[] = {
      {"layer 0: weights of kind 8", [](StoreFixture* s) { number(s, 8, 2, 4); }},
      {"layer 0: weights of kind 8 and 1", [](StoreFixture* s) { number(s, 128 + 52, 1, 4); }},
      {"layer 1: weights of kind 8 and 9", [](StoreFixture* s) { number(s, 256 + 52, 9, 4); }},
      {"layer 0: weights of kind 5 and 5", [](StoreFixture* s) { number(s, 128 + 28, 5, 4); }},
      {"layer 0: weights of kind 2 and 5", [](StoreFixture* s) { number(s, 128 + 28, 2, 4); }},
      {"layer 0: rows of 72 bytes for 96 numbers", [](StoreFixture* s) { number(s, 128 + 28, 4, 4); }},
      {"layer 0: weights of kind 13 and 5", [](StoreFixture* s) { number(s, 128 + 28, 13, 4); }},
      {"layer 0: weights of kind 8", [](StoreFixture* s) { number(s, 128 + 52, 0, 4); }},
      {"layer 0: rows of 96 numbers in blocks of 256", [](StoreFixture* s) { number(s, 128 + 28, 9, 4); }},
      {"layer 0: rows of 72 bytes for 64 numbers", [](StoreFixture* s) { number(s, 128 + 20, 64, 4); }},
      {"layer 0: down rows of 101 bytes for 96 numbers", [](StoreFixture* s) { number(s, 128 + 56, 101, 4); }},
      {"layer 0: slots of 512 bytes for 4 neurons of 246", [](StoreFixture* s) { number(s, 128 + 48, 4, 4); }},
  };
  // Of a store with gates apart: 70 of 72 bytes are two pages.
  const Damage of_apart[] = {
      {"layer 0: 2 pages of gates at 8193", [](StoreFixture* s) { number(s, 128 + 64, 8193, 8); }},
      {"layer 0: 2 pages of gates at 4096", [](StoreFixture* s) { number(s, 128 + 64, 4096, 8); }},
      {"layer 1: 2 pages of gates at", [=](StoreFixture* s) { number(s, 256 + 64, huge, 8); }},
      {"layer 0: 2 pages of gates at", [](StoreFixture* s) { number(s, 128 + 64, s->file.size() - 4096, 8); }},
      {"layer 1: 72 checksums at", [](StoreFixture* s) { number(s, 256 + 8, s->file.size() - 280, 8); }},
      {"layer 0: slots of 512 bytes for 8 neurons of 144", [](StoreFixture* s) { number(s, 128 + 48, 8, 4); }},
  };
  long n = 0;
  const auto check = [&](const Damage& damage, DType dtype, std::int64_t hidden, const DType* down, bool apart) {
    StoreFixture store(rng, 2, 70, 3, hidden, dtype, 0, 1, down, apart);
    damage.make(&store);
    if (damage.sealed) seal(&store.superblock);
    if (store.file.size() > 8192) {
      store.write();
    } else {
      PI2_CHECK(truncate(store.path.c_str(), static_cast<off_t>(store.file.size())) == 0, "truncate");
    }
    const std::string found = opened(store);
    PI2_CHECK(found.find(damage.message) != std::string::npos, "wanted '%s', found '%s'", damage.message,
              found.c_str());
    ++n;
  };
  for (const Damage& damage : cases) check(damage, DType::kQ4, 100, nullptr, false);
  for (const Damage& damage : of_apart) check(damage, DType::kQ4, 100, nullptr, true);
  const DType int8 = DType::kQ8;
  for (const Damage& damage : of_pairs) check(damage, DType::kQ5_1, 96, &int8, false);
  StoreFile none;
  PI2_CHECK(none.open("/nowhere/model.pi2", false).find("cannot be opened: No such file") == 0, "a missing file");
  return n + 1;
}

// Any change of any byte is refused or changes nothing that is used: never a crash (the sanitizers look on).
long check_random(std::mt19937& rng) {
  const StoreFixture store(rng, 2, 70, 3, 100, DType::kQ4);
  long refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::vector<char> superblock = store.superblock;
    for (unsigned k = 0; k <= rng() % 3; ++k)
      superblock[rng() % (i % 2 == 0 ? 384u : 4096u)] = static_cast<char>(rng() % 256);
    if (i % 4 != 0) seal(&superblock);
    std::vector<StoreLayer> layers;
    const std::string wrong = parse_superblock(superblock.data(), static_cast<std::int64_t>(superblock.size()), 4096,
                                               static_cast<std::int64_t>(store.file.size()), &layers);
    refused += !wrong.empty();
    for (const StoreLayer& l : layers) {
      PI2_CHECK(l.slots >= 8192 && l.slots + l.neurons * l.slot_bytes <= static_cast<std::int64_t>(store.file.size()) &&
                    l.checks + 4 * l.neurons <= static_cast<std::int64_t>(store.file.size()) &&
                    l.neuron_bytes() <= l.slot_bytes,
                "a layer outside the file");
    }
  }
  PI2_CHECK(refused > 1000, "%ld refused", refused);
  return 3000;
}

}  // namespace

int main() {
  std::mt19937 rng(6);
  long cases = check_crc();
  cases += check_sound(rng);
  cases += check_damage(rng);
  cases += check_random(rng);
  return finish("test_store_file", cases);
}
