// Any bytes as a delegate blob: what is taken must make sense to whoever computes with it. The first byte says whether
// size and checksum are made right before, which a mutation would hardly ever do.
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "bindings/executorch/blob.h"
#include "fuzz/input.h"
#include "pi2/predict.h"

namespace {

using namespace pi2::et;

void must(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "taken: %s\n", what);
  std::abort();
}

void check(const Blob& b) {
  must(b.hidden > 0 && b.neurons > 0 && (b.rows == 2 || b.rows == 3), "sizes");
  must(b.n_hot >= 0 && b.n_hot <= b.neurons && b.first >= 0 && b.first <= b.neurons, "hot neurons");
  must(pi2::row_bytes(b.w_dtype, b.hidden) > 0 && b.w_dtype != pi2::DType::kI8, "weights");
  must(!b.int8_activations || pi2::is_quantized(b.w_dtype), "int8 activations over floats");
  must(b.threshold >= 0, "threshold");
  must(b.predictor == PredictorForm::kNone || (b.cold() > 0 && b.cut == b.cut), "predictor");
  must(b.preload_from >= 0 && b.preload_from <= (b.role == Role::kWhole ? b.neurons : 0), "preloading");
  must(b.role != Role::kWhole || (b.queue == 0 && b.first == 0), "a whole layer in a queue");
  for (const Place& place : b.tensors)
    must(place.bytes == 0 || (place.bytes <= b.store_bytes && place.offset <= b.store_bytes - place.bytes), "place");
  must(b.store_bytes <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()), "size of the store");
  must(!b.store.empty() && b.store.size() < 128 && b.store.find('/') == std::string::npos &&
           b.store.find('\0') == std::string::npos,
       "name");
  // What a layer reads beside its bundles is there as a whole.
  if (b.predictor == PredictorForm::kSignbit)
    must(b.tensors[kA].bytes == static_cast<std::uint64_t>(b.cold() * pi2::sign_bytes(b.hidden)), "signs");
  if (b.predictor == PredictorForm::kLowrank)
    must(b.rank > 0 && b.tensors[kAScale].bytes == static_cast<std::uint64_t>(4 * b.rank) &&
             b.tensors[kBScale].bytes == static_cast<std::uint64_t>(4 * b.cold()),
         "scales");
  if (b.tensors[kBiasUp].bytes > 0) must(b.tensors[kBiasUp].bytes >= static_cast<std::uint64_t>(2 * b.neurons), "bias");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  std::vector<std::uint8_t> bytes(data + 1, data + size);
  if ((data[0] & pi2_fuzz::kSealed) != 0) {
    bytes.resize(kBlobBytes);
    std::memcpy(bytes.data(), "PI2BLOB", 8);
    pi2_fuzz::put(&bytes, 8, 1, 4);
    pi2_fuzz::put(&bytes, 12, 0, 4);
    pi2_fuzz::put(&bytes, 16, kBlobBytes, 4);
    pi2_fuzz::put(&bytes, 12, pi2::crc32c(bytes.data(), bytes.size()), 4);
  }
  Blob blob;
  const Problem wrong = parse_blob(bytes.data(), bytes.size(), &blob);
  if (!wrong) check(blob);
  return 0;
}
