// Any bytes as a delegate blob: what is taken must make sense to whoever computes with it. The first byte says whether
// size and checksum are made right before, which a mutation would hardly ever do, and whether it is made the blob of a
// store, whose layer is loaded and computed; or that the bytes are options of the backend.
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <sstream>

#include "bindings/executorch/layer.h"
#include "fuzz/input.h"
#include "pi2/predict.h"
#include "tests/executorch/blob_fixture.h"

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
  must(!b.other_down || pi2::is_down_in_bytes(b.down_dtype), "down rows");
  must(!b.int8_activations || b.quantized(), "int8 activations over floats");
  must(b.threshold >= 0, "threshold");
  must(b.shaping.limit > 0 && b.shaping.in - b.shaping.in == 0, "numbers of the activation");
  must(b.predictor == PredictorForm::kNone || (b.cold() > 0 && b.cut == b.cut), "predictor");
  must(b.preload_from >= 0 && b.preload_from <= (b.role == Role::kWhole ? b.neurons : 0), "preloading");
  must(b.role != Role::kWhole || (b.queue == 0 && b.first == 0), "a whole layer in a queue");
  for (const Place& place : b.tensors)
    must(place.bytes == 0 || (place.bytes <= b.store_bytes && place.offset <= b.store_bytes - place.bytes), "place");
  must(b.store_bytes <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()), "size of the store");
  must(!b.store.empty() && b.store.size() < 128 && b.store.find('/') == std::string::npos &&
           b.store.find('\0') == std::string::npos,
       "name");
  // What a layer reads beside its neurons is there as a whole.
  if (b.predictor == PredictorForm::kSignbit)
    must(b.tensors[kA].bytes == static_cast<std::uint64_t>(b.layers() * b.cold() * pi2::sign_bytes(b.hidden)), "signs");
  if (b.predictor == PredictorForm::kLowrank)
    must(b.rank > 0 && b.tensors[kAScale].bytes == static_cast<std::uint64_t>(4 * b.layers() * b.rank) &&
             b.tensors[kBScale].bytes == static_cast<std::uint64_t>(4 * b.layers() * b.cold()),
         "scales");
  if (b.experts > 0) {
    must(b.role == Role::kWhole && b.n_hot == 0 && b.dense_from == 0 && b.tensors[kBiasUp].bytes == 0, "a mixture");
    must(b.predictor == PredictorForm::kNone || b.tensors[kCuts].bytes == static_cast<std::uint64_t>(8 * b.experts),
         "cuts");
  }
  if (b.tensors[kBiasUp].bytes > 0) must(b.tensors[kBiasUp].bytes >= static_cast<std::uint64_t>(2 * b.neurons), "bias");
}

// Small stores; blobs are made theirs.
struct Stores {
  std::mt19937 rng{1};
  pi2_test::StoreFixture floats{rng, 2, 40, 2, 96, pi2::DType::kBF16}, quantised{rng, 2, 40, 3, 96, pi2::DType::kQ4};
};

// Tensors behind the neurons of a store have any bytes: their checksums are made right.
void bind(std::vector<std::uint8_t>* bytes, const pi2_test::StoreFixture& store) {
  const Blob own = pi2_test::blob_of(store, 0);
  pi2_fuzz::put(bytes, 24, own.store_bytes, 8);
  pi2_fuzz::put(bytes, 32, own.header_checksum, 4);
  std::memcpy(bytes->data() + 40, own.model_hash.data(), own.model_hash.size());
  std::memset(bytes->data() + 384, 0, 128);
  std::memcpy(bytes->data() + 384, own.store.data(), own.store.size());
  for (std::size_t i = 0; i < kTensorNames; ++i) {
    std::uint64_t offset = 0, size = 0;
    if (i >= kCuts && (*bytes)[8] == 1) break;
    const std::size_t at = pi2_test::place_of(i);
    std::memcpy(&offset, bytes->data() + at, 8);
    std::memcpy(&size, bytes->data() + at + 8, 8);
    if (offset > store.file.size() || size > store.file.size() - offset) continue;
    pi2_fuzz::put(bytes, at + 16, pi2::crc32c(store.file.data() + offset, size), 4);
  }
}

// Opens the store that the blob is of, loads the layer and computes one token, unless one of them is refused.
void load(const Blob& blob) {
  Settings settings;
  settings.store_path = "/tmp";
  settings.engine = "pread";
  settings.io_threads = 1;
  Problem wrong;
  static std::map<std::string, std::shared_ptr<Store>> open;  // so that they are opened once
  const std::shared_ptr<Store> store = Store::open(blob, settings, &wrong);
  if (wrong || blob.role == Role::kCollect) return;
  open[store->path()] = store;
  const std::shared_ptr<Layer> layer = Layer::load(store, blob, &wrong);
  if (wrong) return;
  std::vector<float> x(static_cast<std::size_t>(blob.hidden), 0.5f), y(x.size());
  if (blob.experts > 0) {
    const std::int64_t index[] = {0, blob.experts - 1};
    const float routing[] = {0.75f, 0.25f};
    wrong = layer->mix(
        {x.data(), y.data(), pi2::DType::kF32, 1, blob.hidden, index, routing, pi2::DType::kF32, 2, blob.experts},
        pi2::serial());
  } else {
    wrong = layer->compute(x.data(), y.data(), pi2::DType::kF32, 1, pi2::serial());
  }
  must(!wrong || !wrong.text.empty(), "no reason");
}

// "key=value" pairs, a line each: refused by name, or within bounds.
void set(const std::uint8_t* data, std::size_t size) {
  Settings settings;
  std::istringstream lines(std::string(reinterpret_cast<const char*>(data), size));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t equals = line.find('=');
    if (equals == std::string::npos) continue;
    (void)change(&settings, line.substr(0, equals), line.substr(equals + 1));
  }
  must(settings.threads >= 0 && settings.threads <= 1024 && settings.io_threads > 0 && settings.io_threads <= 1024 &&
           settings.cache_bytes >= -1,
       "settings");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  if ((data[0] & pi2_fuzz::kOptions) != 0) {
    set(data + 1, size - 1);
    return 0;
  }
  static const auto* const stores = new Stores();
  std::vector<std::uint8_t> bytes(data + 1, data + size);
  const bool loaded = (data[0] & pi2_fuzz::kLoaded) != 0;
  if (loaded || (data[0] & pi2_fuzz::kSealed) != 0) {
    bytes.resize(kBlobBytes);
    if (loaded) bind(&bytes, (data[0] & pi2_fuzz::kQuantised) != 0 ? stores->quantised : stores->floats);
    std::memcpy(bytes.data(), "PI2BLOB", 8);
    pi2_fuzz::put(&bytes, 8, bytes[8] == 2 ? 2 : 1, 4);
    pi2_fuzz::put(&bytes, 12, 0, 4);
    pi2_fuzz::put(&bytes, 16, kBlobBytes, 4);
    pi2_fuzz::put(&bytes, 12, pi2::crc32c(bytes.data(), bytes.size()), 4);
  }
  Blob blob;
  const Problem wrong = parse_blob(bytes.data(), bytes.size(), &blob);
  if (wrong) return 0;
  check(blob);
  if (loaded) load(blob);
  return 0;
}
