// The delegate blob: what it takes, and what it refuses by name.
#include <cmath>
#include <functional>

#include "tests/executorch/blob_fixture.h"

namespace {

using namespace pi2;
using namespace pi2::et;
using namespace pi2_test;

// A submitted layer with everything that a blob can have.
Blob sound() {
  Blob b;
  b.role = Role::kSubmit;
  b.store_bytes = 1 << 20;
  b.header_checksum = 0xdeadbeef;
  b.layer = 7;
  for (std::size_t i = 0; i < 32; ++i) b.model_hash[i] = static_cast<unsigned char>(i + 1);
  b.hidden = 96;
  b.neurons = 300;
  b.rows = 3;
  b.w_dtype = DType::kQ4;
  b.activation = Activation::kSilu;
  b.activation_on_up = b.int8_activations = b.predictor_int8_activations = true;
  b.n_hot = 100;
  b.first = 64;
  b.threshold = 0.25f;
  b.predictor = PredictorForm::kLowrankInt4;
  b.cut = -1.5;
  b.rank = 40;
  b.dense_from = 33;
  b.tensors[kBiasGate] = {4096, 1200, 1};
  b.tensors[kBiasUp] = {8192, 1200, 2};
  b.tensors[kBiasDown] = {9392, 384, 3};
  b.tensors[kA] = {12288, 40 * 54, 4};
  b.tensors[kB] = {16384, 200 * 36, 5};
  b.tensors[kBBias] = {(1 << 20) - 800, 800, 6};
  b.queue = 9;
  b.store = "model.pi2";
  return b;
}

// A mixture with everything that it can have.
Blob mixture() {
  Blob b = sound();
  b.role = Role::kWhole;
  b.queue = 0;
  b.n_hot = b.first = b.dense_from = 0;
  b.threshold = 0;
  b.cut = 0;
  b.experts = 6;
  b.tensors[kBiasGate] = b.tensors[kBiasUp] = b.tensors[kBiasDown] = {};
  b.tensors[kA] = {12288, 6 * 40 * 54, 4};
  b.tensors[kB] = {65536, 6 * 300 * 36, 5};
  b.tensors[kBBias] = {(1 << 20) - 7200, 7200, 6};
  b.tensors[kCuts] = {256, 48, 7};
  b.tensors[kThresholds] = {512, 48, 8};
  return b;
}

// The same in two formats.
Blob pair(Blob b) {
  b.w_dtype = DType::kQ5_0;
  b.down_dtype = DType::kQ8;
  b.other_down = true;
  return b;
}

// A layer whose neurons have their own thresholds.
Blob thresholds() {
  Blob b = sound();
  b.predictor = PredictorForm::kNone;
  b.predictor_int8_activations = false;
  b.cut = 0;
  b.rank = 0;
  b.tensors = {};
  b.tensors[kThresholds] = {512, 1200, 0};
  return b;
}

// A mixture of gpt-oss' formula, with biases.
Blob shaped() {
  Blob b = mixture();
  b.shaping.plain = false;
  b.shaping.in = 1.5f;
  b.shaping.out = -2;
  b.shaping.limit = 7;
  b.shaping.plus = 1;
  b.tensors[kBiasGate] = {4096, 6 * 1200, 1};
  b.tensors[kBiasUp] = {16384, 6 * 1200, 2};
  b.tensors[kBiasDown] = {32768, 6 * 384, 3};
  return b;
}

// Whose up is computed before its gate.
Blob up_first() {
  Blob b = thresholds();
  b.activation_on_up = false;
  b.shaping.plain = false;
  b.shaping.second = true;
  return b;
}

bool same(const Blob& a, const Blob& b) { return written(a) == written(b); }

long check_sound() {
  Blob found;
  Problem wrong = parse_blob(written(sound()).data(), kBlobBytes, &found);
  PI2_CHECK(!wrong && same(found, sound()) && found.dense_from == 33, "%s", wrong.text.c_str());
  Blob plain = sound();  // of the other kinds
  plain.role = Role::kWhole;
  plain.queue = 0;
  plain.first = 0;
  plain.preload_from = 128;
  plain.rows = 2;
  plain.activation_on_up = plain.predictor_int8_activations = false;
  plain.tensors[kBiasGate] = {};
  plain.predictor = PredictorForm::kLowrank;
  plain.tensors[kA].bytes = 40 * 96;
  plain.tensors[kAScale] = {0, 160, 0};
  plain.tensors[kB].bytes = 200 * 40;
  plain.tensors[kBScale] = {0, 800, 0};
  plain.store = std::string(127, 'x');
  wrong = parse_blob(written(plain).data(), kBlobBytes, &found);
  PI2_CHECK(!wrong && same(found, plain), "%s", wrong.text.c_str());
  Blob signs = plain;
  signs.predictor = PredictorForm::kSignbit;
  signs.rank = 0;
  signs.cut = 1.25;
  signs.tensors = {};
  signs.tensors[kA] = {512, 200 * 16, 0};
  wrong = parse_blob(written(signs).data(), kBlobBytes, &found);
  PI2_CHECK(!wrong && same(found, signs), "%s", wrong.text.c_str());
  Blob floats = signs;
  floats.predictor = PredictorForm::kNone;
  floats.w_dtype = DType::kBF16;
  floats.int8_activations = false;
  floats.cut = 0;
  floats.tensors = {};
  floats.tensors[kBiasUp] = {512, 600, 0};
  floats.n_hot = 300;
  wrong = parse_blob(written(floats).data(), kBlobBytes, &found);
  PI2_CHECK(!wrong && same(found, floats), "%s", wrong.text.c_str());
  wrong = parse_blob(written(mixture()).data(), kBlobBytes, &found);
  PI2_CHECK(!wrong && same(found, mixture()) && found.experts == 6, "%s", wrong.text.c_str());
  Blob gates = mixture();  // of which every gate is computed
  gates.predictor = PredictorForm::kNone;
  gates.predictor_int8_activations = false;
  gates.rank = 0;
  for (const TensorName name : {kA, kB, kBBias, kCuts, kThresholds}) gates.tensors[name] = {};
  wrong = parse_blob(written(gates).data(), kBlobBytes, &found);
  PI2_CHECK(!wrong && same(found, gates), "%s", wrong.text.c_str());
  for (const Blob& one : {pair(sound()), pair(mixture())}) {
    wrong = parse_blob(written(one).data(), kBlobBytes, &found);
    PI2_CHECK(!wrong && same(found, one) && found.other_down && found.down_dtype == DType::kQ8, "%s",
              wrong.text.c_str());
  }
  wrong = parse_blob(written(thresholds()).data(), kBlobBytes, &found);
  PI2_CHECK(!wrong && same(found, thresholds()) && found.own_thresholds(), "%s", wrong.text.c_str());
  Blob cut = shaped();  // Gemma 3n's
  cut.experts = 0;
  cut.tensors = {};
  cut.predictor = PredictorForm::kNone;
  cut.predictor_int8_activations = cut.activation_on_up = false;
  cut.rank = 0;
  cut.int8_activations = true;
  cut.shaping = Shaping();
  cut.shaping.plain = false;
  cut.shaping.sigmas = 1.6f;
  for (const Blob& one : {shaped(), cut, up_first()}) {
    wrong = parse_blob(written(one).data(), kBlobBytes, &found);
    PI2_CHECK(!wrong && same(found, one) && !found.shaping.plain && found.shaping.sigmas == one.shaping.sigmas &&
                  found.shaping.second == one.shaping.second,
              "%s", wrong.text.c_str());
  }
  return 12;
}

struct Damage {
  const char* message;
  std::function<void(Bytes512*)> make;
  bool sealed = true;  // the checksum is made right again
  Fault fault = Fault::kProgram;
};

std::function<void(Bytes512*)> number(std::size_t at, std::uint64_t value, std::size_t bytes = 4) {
  return [=](Bytes512* b) { put(b, at, value, bytes); };
}

long check_refused() {
  const std::uint64_t nan = bits(std::nan("")), nan32 = bits(std::nanf(""));
  const Damage all[] = {
      {"size: expected 512 bytes, found 511", [](Bytes512* b) { b->pop_back(); }, false},
      {"size: expected 512 bytes, found 0", [](Bytes512* b) { b->clear(); }, false},
      {"size: expected 512 bytes, found 513", [](Bytes512* b) { b->push_back(0); }, false},
      {"magic: expected PI2BLOB, found other bytes", [](Bytes512* b) { (*b)[0] = 'p'; }},
      {"version: expected 1 to 3, found 4", number(8, 4), true, Fault::kIncompatible},
      {"checksum: expected that of its bytes, found another", [](Bytes512* b) { (*b)[75] ^= 4; }, false},
      {"size: expected 512, found 256", number(16, 256)},
      {"role: expected 0 to 2, found 3", number(20, 3)},
      {"size of the store", number(24, ~std::uint64_t{0}, 8)},
      {"no queue and no accelerator for a whole layer, found queue 9, neurons from 64", number(20, 0)},
      {"sizes: expected neurons of 2 or 3 rows, found 300 of 3 rows of 0", number(72, 0)},
      {"sizes", number(72, 1u << 31)},
      {"sizes", number(76, 0)},
      {"sizes", number(80, 4)},
      {"weights: expected a kind that stores have, found 3", number(84, 3)},
      {"weights: expected a kind that stores have, found 6", number(84, 6)},
      {"activation: expected 0 to 5, found 6", number(88, 6)},
      {"flags: expected those of 7, found 8", number(92, 8)},
      {"hot neurons: expected 0 to 300, found 301 and 64", number(96, 301)},
      {"hot neurons", number(100, 301)},
      {"threshold: expected 0 or more, found -", number(104, bits(-1.0f))},
      {"threshold", number(104, nan32)},
      {"predictor: expected 0 to 4, found 5", number(108, 5)},
      {"cut: expected a threshold or a margin, found", number(112, nan, 8)},
      {"rank: expected that of the predictor, found 0", number(120, 0)},
      {"predictor: expected none where all neurons are hot, found ", number(96, 300)},
      {"bias_gate: expected 1200 bytes, found 1201", number(136, 1201, 8)},
      {"bias_down: expected a place in a store of 1048576 bytes, found 384 at 1048193",
       number(128 + 48, (1 << 20) - 383, 8)},
      {"bias_down: expected a place", number(128 + 48, ~std::uint64_t{0}, 8)},
      {"a: expected 2160 bytes, found 0", number(136 + 72, 0, 8)},
      {"a_scale: expected 0 bytes, found 160", number(136 + 96, 160, 8)},
      {"b: expected 7200 bytes, found 7199", number(136 + 120, 7199, 8)},
      {"b_bias: expected a zero behind it, found 1", number(148 + 168, 1)},
      {"neurons to preload: expected those from 0 to 0 on, found 1", number(324, 1)},
      {"byte 328: expected 0, found 1", number(328, 1)},
      {"byte 383: expected 0, found 7", number(383, 7, 1)},
      {"name of the store: expected that of a file, without folders, found ''",
       [](Bytes512* b) { std::memset(&(*b)[384], 0, 128); }},
      {"name of the store: expected that of a file, without folders, found '../model.pi2'",
       [](Bytes512* b) { std::memcpy(&(*b)[384], "../model.pi2", 12); }},
      {"name of the store", [](Bytes512* b) { std::memset(&(*b)[384], 'x', 128); }},
      {"name of the store: expected zeros behind it", number(400, 1)},
  };
  const Damage of_mixtures[] = {
      {"experts: expected 1 or more, found 0", number(376, 0)},
      {"flags: expected those of 7, found 15", number(92, 15)},
      {"experts: expected a whole layer without hot neurons", number(96, 1)},
      {"experts: expected a whole layer without hot neurons", number(20, 1)},
      {"experts: expected a whole layer without hot neurons", number(324, 1)},
      {"experts: expected a whole layer without hot neurons", number(124, 33)},
      {"experts: expected a whole layer without hot neurons", number(104, bits(0.5f))},
      {"experts: expected a whole layer without hot neurons", number(112, bits(0.5), 8)},
      {"weights: expected a kind that stores have, found 4 and 1", number(380, 1)},
      {"experts: expected at most 1073741824 neurons, found 4294967295", number(376, 0xffffffff)},
      {"a: expected 15120 bytes, found 12960", number(376, 7)},
      {"bias_up: expected 0 bytes, found 1200", number(136 + 24, 1200, 8)},
      {"cuts: expected 48 bytes, found 0", number(328 + 8, 0, 8)},
      {"thresholds: expected 48 bytes, found 40", number(352 + 8, 40, 8)},
      {"byte 329: expected 0, found 1", number(8, 1)},
  };
  const Damage of_pairs[] = {
      {"weights: expected a kind that stores have, found 7", number(380, 0)},
      {"weights: expected a kind that stores have, found 7 and 7", number(380, 7)},
      {"weights: expected a kind that stores have, found 7 and 12", number(380, 12)},
      {"weights: expected a kind that stores have, found 5 and 5", number(84, 5)},
      {"weights: expected a kind that stores have, found 1 and 5", number(84, 1)},
      {"weights: expected a kind that stores have, found 9 and 5", number(84, 9)},  // 96 numbers are no block of 256
      {"byte 380: expected 0, found 5", number(8, 1)},
      {"byte 328: expected 0, found 1", number(328, 1)},
      {"bias_gate: expected 1200 bytes, found 600", number(136, 600, 8)},
  };
  const Damage of_thresholds[] = {
      {"thresholds: expected 1200 bytes, found 300", number(352 + 8, 300, 8)},
      {"byte 336: expected 0, found 8", number(328 + 8, 8, 8)},
      {"byte 353: expected 0, found 2", number(8, 1)},
      {"experts: expected 1 or more, found 0", number(8, 2)},
  };
  const Damage of_up_first[] = {
      {"numbers of the activation: expected second of a layer that is no expert, alone on it",
       number(92, 1 + 2 + 8 + 16)},
      {"flags: expected those of", number(92, 2 + 16)},
      {"flags: expected those of", number(80, 2)},
  };
  const Damage of_shaped[] = {
      {"name of the store: expected zeros behind it", number(8, 2)},
      {"numbers of the activation: expected finite ones, and a limit above 0", number(480, nan32)},
      {"numbers of the activation", number(488, bits(0.0f))},
      {"numbers of the activation: expected sigmas of a whole layer without predictor", number(496, bits(1.0f))},
      {"byte 500: expected 0, found 1", number(500, 1)},
      {"byte 482: expected 0, found 192", number(92, 7)},
      {"numbers of the activation: expected second of a layer that is no expert", number(92, 2 + 4 + 8 + 16)},
      {"bias_up: expected 7200 bytes, found 1200", number(136 + 24, 1200, 8)},
  };
  const auto refused = [](const Blob& blob, const Damage& damage) {
    Bytes512 bytes = written(blob);
    damage.make(&bytes);
    if (damage.sealed) seal_blob(&bytes);
    Blob found;
    const Problem wrong = parse_blob(bytes.data(), bytes.size(), &found);
    PI2_CHECK(wrong.fault == damage.fault && wrong.text.find(damage.message) != std::string::npos, "%s: found '%s'",
              damage.message, wrong.text.c_str());
    PI2_CHECK(wrong.text.rfind("delegate blob, ", 0) == 0 && wrong.text.find("export it again") != std::string::npos,
              "%s", wrong.text.c_str());
  };
  for (const Damage& damage : all) refused(sound(), damage);
  for (const Damage& damage : of_mixtures) refused(mixture(), damage);
  for (const Damage& damage : of_pairs) refused(pair(sound()), damage);
  for (const Damage& damage : of_thresholds) refused(thresholds(), damage);
  for (const Damage& damage : of_up_first) refused(up_first(), damage);
  for (const Damage& damage : of_shaped) refused(shaped(), damage);
  return static_cast<long>(std::size(all) + std::size(of_mixtures) + std::size(of_pairs) + std::size(of_thresholds) +
                           std::size(of_up_first) + std::size(of_shaped));
}

// Every byte says something: of a change, sealed again, what is taken is what was written, and not what was there.
long check_every_byte() {
  const Bytes512 wholes[] = {written(sound()), written(mixture()), written(pair(mixture())), written(thresholds()),
                             written(shaped())};
  for (const Bytes512& whole : wholes)
    for (std::size_t i = 0; i < whole.size(); ++i) {
      Bytes512 bytes = whole;
      bytes[i] = static_cast<char>(bytes[i] ^ 0x10);
      Blob found;
      PI2_CHECK(parse_blob(bytes.data(), bytes.size(), &found), "byte %zu", i);
      seal_blob(&bytes);
      if (i >= 12 && i < 16) continue;  // the checksum is right again
      PI2_CHECK(parse_blob(bytes.data(), bytes.size(), &found) || written(found) == bytes, "byte %zu is not read", i);
    }
  return 1536;
}

}  // namespace

int main() { return finish("blob", check_sound() + check_refused() + check_every_byte()); }
