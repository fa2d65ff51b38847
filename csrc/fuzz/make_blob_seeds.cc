// The inputs from which fuzz_blob begins, csrc/fuzz/seeds/blob: sound blobs of every kind of predictor, as they are, to
// be sealed again and to be loaded, and options. Takes a folder.
#include <cstdio>

#include "fuzz/input.h"
#include "pi2/predict.h"
#include "tests/executorch/blob_fixture.h"

namespace {

using namespace pi2::et;

Blob sound(PredictorForm form, bool quantized, bool loaded) {
  Blob b;
  b.store_bytes = 1 << 20;
  b.hidden = 96;
  b.neurons = loaded ? 40 : 300;
  b.rows = quantized ? 3 : 2;
  b.w_dtype = quantized ? pi2::DType::kQ4 : pi2::DType::kBF16;
  b.n_hot = loaded ? 10 : 100;
  b.predictor = form;
  b.role = quantized && !loaded ? Role::kSubmit : Role::kWhole;
  b.first = !quantized || loaded ? 0 : form == PredictorForm::kSignbit ? 128 : 64;
  b.preload_from = quantized ? 0 : loaded ? 5 : 64;
  b.queue = b.role == Role::kSubmit ? 1 : 0;
  b.store = "model.pi2";
  const bool lowrank = form != PredictorForm::kNone && form != PredictorForm::kSignbit;
  const bool scaled = form == PredictorForm::kLowrank;
  const pi2::DType dtype = scaled                                ? pi2::DType::kI8
                           : form == PredictorForm::kLowrankInt4 ? pi2::DType::kQ4
                                                                 : pi2::DType::kQ8;
  const auto place = [&](TensorName name, std::int64_t bytes) {
    const int step = loaded ? 64 : 4096;  // within the store of fuzz_blob
    b.tensors[name] = {static_cast<std::uint64_t>(step * (name + 1)), static_cast<std::uint64_t>(bytes), 0};
  };
  place(kBiasUp, b.neurons * (quantized ? 4 : 2));
  if (form == PredictorForm::kSignbit) place(kA, b.cold() * pi2::sign_bytes(b.hidden));
  if (!lowrank) return b;
  b.rank = 32;
  place(kA, b.rank * pi2::row_bytes(dtype, b.hidden));
  place(kB, b.cold() * pi2::row_bytes(dtype, b.rank));
  if (scaled) place(kAScale, 4 * b.rank);
  if (scaled) place(kBScale, 4 * b.cold());
  place(kBBias, 4 * b.cold());
  return b;
}

// The same layer as two experts, or one.
Blob mixture(Blob b, std::int64_t experts) {
  b.role = Role::kWhole;
  b.n_hot = b.first = b.preload_from = 0;
  b.queue = 0;
  b.experts = experts;
  b.tensors = {};
  const bool lowrank = b.predictor == PredictorForm::kLowrankInt4;
  const auto place = [&](TensorName name, std::int64_t bytes) {
    b.tensors[name] = {64, static_cast<std::uint64_t>(bytes), 0};
  };
  place(kThresholds, 8 * experts);
  if (b.predictor != PredictorForm::kNone) place(kCuts, 8 * experts);
  if (lowrank) place(kA, experts * b.rank * pi2::row_bytes(pi2::DType::kQ4, b.hidden));
  if (lowrank) place(kB, experts * b.cold() * pi2::row_bytes(pi2::DType::kQ4, b.rank));
  if (b.predictor == PredictorForm::kSignbit) place(kA, experts * b.cold() * pi2::sign_bytes(b.hidden));
  return b;
}

int save(const std::string& folder, const std::string& name, std::uint8_t how, const std::vector<char>& bytes) {
  std::FILE* out = std::fopen((folder + "/" + name).c_str(), "wb");
  return out == nullptr || std::fputc(how, out) == EOF ||
         std::fwrite(bytes.data(), 1, bytes.size(), out) != bytes.size() || std::fclose(out) != 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  using namespace pi2_fuzz;
  constexpr int kForms = 15;  // from the 11th on of mixtures, but for the 14th; the last two with all else
  constexpr PredictorForm kOfMixtures[] = {PredictorForm::kNone, PredictorForm::kLowrankInt4, PredictorForm::kSignbit,
                                           PredictorForm::kNone, PredictorForm::kNone};
  for (const int how : {0, int{kSealed}, int{kLoaded}}) {
    for (int form = 0; form < kForms; ++form) {
      const bool quantized = form < 5 || form >= 10;
      const PredictorForm predictor = form < 10 ? static_cast<PredictorForm>(form % 5) : kOfMixtures[form - 10];
      Blob layer = sound(predictor, quantized, how == kLoaded);
      if (form >= 13) {
        layer.w_dtype = pi2::DType::kQ5_0;
        layer.down_dtype = pi2::DType::kQ8;
        layer.other_down = true;
        layer.shaping.plain = false;
        layer.shaping.limit = 7;
      }
      const bool mixed = form >= 10 && form != 13;
      if (mixed) layer = mixture(layer, form == 11 ? 1 : 2);
      layer.shaping.second = form == 13;
      if (form == 13) layer.tensors[kThresholds] = {64, static_cast<std::uint64_t>(4 * layer.neurons), 0};
      if (form == 14) layer.tensors[kBiasDown] = {64, static_cast<std::uint64_t>(4 * 2 * layer.hidden), 0};
      const std::vector<char> bytes = pi2_test::written(layer);
      Blob found;
      const Problem wrong = parse_blob(bytes.data(), bytes.size(), &found);
      if (wrong) {  // what is refused is no beginning
        std::fprintf(stderr, "%s\n", wrong.text.c_str());
        return 1;
      }
      const int quantised = how == kLoaded && quantized ? kQuantised : 0;
      const std::string name = "blob-" + std::to_string(how) + "-" + std::to_string(form);
      if (save(argv[1], name, static_cast<std::uint8_t>(how | quantised), bytes) != 0) return 1;
    }
  }
  const std::string options =
      "store_path=/tmp\ncache_bytes_kib=64\nthreads=2\nio_threads=8\nengine=pread\npolicy=lru\n"
      "direct=false\npreload=1\ntrace=-\n";
  return save(argv[1], "options", kOptions, {options.begin(), options.end()});
}
