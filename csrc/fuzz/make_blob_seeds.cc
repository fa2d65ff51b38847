// Inputs from which fuzz_blob begins: sound blobs of every kind of predictor, as they are and to be sealed again. Takes
// a folder.
#include <cstdio>

#include "fuzz/input.h"
#include "pi2/predict.h"
#include "tests/executorch/blob_fixture.h"

namespace {

using namespace pi2::et;

Blob sound(PredictorForm form, bool quantized) {
  Blob b;
  b.store_bytes = 1 << 20;
  b.hidden = 96;
  b.neurons = 300;
  b.rows = quantized ? 3 : 2;
  b.w_dtype = quantized ? pi2::DType::kQ4 : pi2::DType::kBF16;
  b.n_hot = 100;
  b.predictor = form;
  b.role = quantized ? Role::kSubmit : Role::kWhole;
  b.first = !quantized ? 0 : form == PredictorForm::kSignbit ? 128 : 64;
  b.preload_from = quantized ? 0 : 64;
  b.queue = quantized ? 1 : 0;
  b.store = "model.pi2";
  const bool lowrank = form != PredictorForm::kNone && form != PredictorForm::kSignbit;
  const bool scaled = form == PredictorForm::kLowrank;
  const pi2::DType dtype = scaled                                ? pi2::DType::kI8
                           : form == PredictorForm::kLowrankInt4 ? pi2::DType::kQ4
                                                                 : pi2::DType::kQ8;
  const auto place = [&](TensorName name, std::int64_t bytes) {
    b.tensors[name] = {static_cast<std::uint64_t>(4096 * (name + 1)), static_cast<std::uint64_t>(bytes), 0};
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

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  for (int seed = 0; seed < 20; ++seed) {
    const std::vector<char> bytes = pi2_test::written(sound(static_cast<PredictorForm>(seed % 5), seed < 10));
    Blob found;
    const Problem wrong = parse_blob(bytes.data(), bytes.size(), &found);
    if (wrong) {  // what is refused is no beginning
      std::fprintf(stderr, "%s\n", wrong.text.c_str());
      return 1;
    }
    const std::string path = std::string(argv[1]) + "/sound-" + std::to_string(seed);
    std::FILE* out = std::fopen(path.c_str(), "wb");
    if (out == nullptr || std::fputc(seed / 5 % 2, out) == EOF ||
        std::fwrite(bytes.data(), 1, bytes.size(), out) != bytes.size() || std::fclose(out) != 0)
      return 1;
  }
  return 0;
}
