#include "bindings/executorch/blob.h"

#include <cmath>
#include <cstring>
#include <iterator>
#include <vector>

#include "base/crc32c.h"
#include "pi2/predict.h"
#include "store/store_file.h"

namespace pi2::et {

const char* const kTensorText[kTensorNames] = {"bias_gate", "bias_up", "bias_down", "a",    "a_scale",
                                               "b",         "b_scale", "b_bias",    "cuts", "thresholds"};

namespace {

constexpr char kMagic[8] = {'P', 'I', '2', 'B', 'L', 'O', 'B', '\0'};
constexpr std::uint32_t kLayerVersion = 1, kMixtureVersion = 2, kExtendedVersion = 3;
constexpr std::size_t kVersion = 8, kPlaces = 128, kQueue = 320, kPreload = 324, kMorePlaces = 328, kExperts = 376,
                      kDown = 380, kName = 384, kNumbers = 480, kNumbersEnd = 500;
constexpr std::uint32_t kOnUp = 1, kInt8 = 2, kPredictorInt8 = 4, kShaped = 8, kSecond = 16;
constexpr const char* kFix = "The .pte is damaged, or of another version of torch_pi2: export it again.";

Problem damaged(const std::string& what, const std::string& expected, const std::string& found) {
  return problem(Fault::kProgram, "delegate blob, " + what, expected, found, kFix);
}

// Reads little-endian numbers at offsets.
struct Reader {
  const unsigned char* p;

  std::uint32_t u32(std::size_t at) const {
    return static_cast<std::uint32_t>(p[at]) | static_cast<std::uint32_t>(p[at + 1]) << 8 |
           static_cast<std::uint32_t>(p[at + 2]) << 16 | static_cast<std::uint32_t>(p[at + 3]) << 24;
  }
  std::uint64_t u64(std::size_t at) const { return u32(at) | static_cast<std::uint64_t>(u32(at + 4)) << 32; }
  template <class Float, class Bits>
  static Float as(Bits bits) {
    static_assert(sizeof(Float) == sizeof(Bits));
    Float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
};

bool is_extended(const Reader& in) { return in.u32(kVersion) == kExtendedVersion; }

std::string text(std::uint64_t value) { return std::to_string(value); }

// The size of a tensor, and whether it is required.
struct Wanted {
  std::uint64_t bytes = 0;
  bool always = false;
};

std::array<Wanted, kTensorNames> wanted(const Blob& b, bool extended) {
  const auto rows = [&b](std::int64_t count, std::int64_t bytes) {
    return static_cast<std::uint64_t>(b.layers() * count * bytes);
  };
  const std::int64_t bias = b.experts > 0 && !extended ? 0 : row_bytes(b.quantized() ? DType::kF32 : b.w_dtype, 1);
  std::array<Wanted, kTensorNames> all{};
  if (b.rows == 3) all[kBiasGate].bytes = rows(b.neurons, bias);
  all[kBiasUp].bytes = rows(b.neurons, bias);
  all[kBiasDown].bytes = rows(b.hidden, bias);
  const std::int64_t number = b.experts > 0 ? sizeof(double) : 0;
  all[kThresholds].bytes = b.experts == 0 && extended ? rows(b.neurons, 4) : rows(1, number);
  if (b.predictor != PredictorForm::kNone) all[kCuts] = {rows(1, number), number > 0};
  if (b.predictor == PredictorForm::kNone) return all;
  if (b.predictor == PredictorForm::kSignbit) {
    all[kA] = {rows(b.cold(), sign_bytes(b.hidden)), true};
    return all;
  }
  const bool scaled = b.predictor == PredictorForm::kLowrank;
  const DType dtype = matrix_dtype(b.predictor);
  all[kA] = {rows(b.rank, row_bytes(dtype, b.hidden)), true};
  all[kB] = {rows(b.cold(), row_bytes(dtype, b.rank)), true};
  if (scaled) all[kAScale] = {rows(b.rank, 4), true};
  if (scaled) all[kBScale] = {rows(b.cold(), 4), true};
  all[kBBias].bytes = rows(b.cold(), 4);
  return all;
}

Problem parse_tensors(const Reader& in, Blob* b) {
  const std::array<Wanted, kTensorNames> all = wanted(*b, is_extended(in));
  for (std::size_t i = 0; i < kTensorNames; ++i) {
    const std::size_t at = i < kCuts ? kPlaces + 24 * i : kMorePlaces + 24 * (i - kCuts);
    Place& place = b->tensors[i];
    place = {in.u64(at), in.u64(at + 8), in.u32(at + 16)};
    const std::string name = kTensorText[i];
    if (in.u32(at + 20) != 0) return damaged(name, "a zero behind it", text(in.u32(at + 20)));
    if (place.bytes == 0 && !all[i].always) continue;
    if (place.bytes != all[i].bytes || place.bytes == 0)
      return damaged(name, text(all[i].bytes) + " bytes", text(place.bytes));
    if (place.offset > b->store_bytes || place.bytes > b->store_bytes - place.offset)
      return damaged(name, "a place in a store of " + text(b->store_bytes) + " bytes",
                     text(place.bytes) + " at " + text(place.offset));
  }
  return {};
}

Problem parse_name(const char* name, std::size_t most, std::string* out) {
  const std::size_t length = strnlen(name, most);
  for (std::size_t i = length; i < most; ++i)
    if (name[i] != 0) return damaged("name of the store", "zeros behind it", "other bytes");
  *out = std::string(name, length);
  const bool plain = length > 0 && length < most && out->find('/') == std::string::npos && *out != "." && *out != "..";
  return plain ? Problem() : damaged("name of the store", "that of a file, without folders", "'" + *out + "'");
}

// The numbers of the activation, followed by zeros.
Problem parse_shaping(const Reader& in, std::uint32_t flags, Blob* b) {
  const bool shaped = (flags & kShaped) != 0;
  for (std::size_t i = shaped ? kNumbersEnd : kNumbers; i < kBlobBytes; ++i)
    if (in.p[i] != 0) return damaged("byte " + text(i), "0", text(in.p[i]));
  if (!shaped) return {};
  Shaping& s = b->shaping;
  s.plain = false;
  s.second = (flags & kSecond) != 0;
  float* const numbers[] = {&s.in, &s.out, &s.limit, &s.plus, &s.sigmas};
  for (std::size_t i = 0; i < std::size(numbers); ++i) *numbers[i] = Reader::as<float>(in.u32(kNumbers + 4 * i));
  if (!std::isfinite(s.in) || !std::isfinite(s.out) || !(s.limit > 0) || !std::isfinite(s.plus) ||
      !(s.sigmas < Shaping::kInfinity))
    return damaged("numbers of the activation", "finite ones, and a limit above 0", "others");
  if (s.cuts() && (b->experts > 0 || b->first > 0 || b->activation_on_up || b->predictor != PredictorForm::kNone))
    return damaged("numbers of the activation", "sigmas of a whole layer without predictor, on its gate", "others");
  if (s.second && (b->experts > 0 || b->activation_on_up || s.cuts()))
    return damaged("numbers of the activation", "second of a layer that is no expert, alone on it", "others");
  return {};
}

Problem parse_layer(const Reader& in, Blob* b) {
  constexpr std::uint32_t kMost = 1u << 30;  // products of two fit into 64 bits
  const std::uint32_t hidden = in.u32(72), neurons = in.u32(76), rows = in.u32(80), w_dtype = in.u32(84);
  if (hidden == 0 || hidden > kMost || neurons == 0 || neurons > kMost || (rows != 2 && rows != 3))
    return damaged("sizes", "neurons of 2 or 3 rows", text(neurons) + " of " + text(rows) + " rows of " + text(hidden));
  const std::uint32_t down = in.u32(kDown);
  b->other_down = is_extended(in) && down != 0;
  if (b->other_down ? !is_pair_of_neurons(w_dtype, down, hidden) : down != 0 || !is_dtype_of_neurons(w_dtype))
    return damaged("weights", "a kind that stores have", text(w_dtype) + (down == 0 ? "" : " and " + text(down)));
  const std::uint32_t activation = in.u32(88), flags = in.u32(92);
  if (activation >= kActivationCount)
    return damaged("activation", "0 to " + text(kActivationCount - 1), text(activation));
  b->hidden = hidden;
  b->neurons = neurons;
  b->rows = rows;
  b->w_dtype = static_cast<DType>(w_dtype);
  b->down_dtype = static_cast<DType>(down);
  b->activation = static_cast<Activation>(activation);
  b->activation_on_up = (flags & kOnUp) != 0;
  b->int8_activations = (flags & kInt8) != 0;
  b->predictor_int8_activations = (flags & kPredictorInt8) != 0;
  const std::uint32_t n_hot = in.u32(96), first = in.u32(100), form = in.u32(108), rank = in.u32(120);
  if (n_hot > neurons || first > neurons)
    return damaged("hot neurons", "0 to " + text(neurons), text(n_hot) + " and " + text(first));
  if (form > static_cast<std::uint32_t>(PredictorForm::kSignbit)) return damaged("predictor", "0 to 4", text(form));
  b->n_hot = n_hot;
  b->first = first;
  b->predictor = static_cast<PredictorForm>(form);
  b->threshold = Reader::as<float>(in.u32(104));
  b->cut = Reader::as<double>(in.u64(112));
  b->rank = rank;
  b->dense_from = in.u32(124);
  if (b->experts > 0 && (n_hot != 0 || b->role != Role::kWhole || b->preload_from != 0 || b->dense_from != 0 ||
                         b->threshold != 0 || b->cut != 0))
    return damaged("experts", "a whole layer without hot neurons and numbers of its own", "others");
  const std::uint64_t most = kMost / static_cast<std::uint64_t>(b->layers());
  if (neurons > most || rank > most)
    return damaged("experts", "at most " + text(kMost) + " neurons", text(in.u32(kExperts)));
  const bool lowrank = form != 0 && b->predictor != PredictorForm::kSignbit;
  const bool grouped = lowrank && b->predictor != PredictorForm::kLowrank;
  const bool extended = is_extended(in);
  const std::uint32_t known = (rows == 3 ? kOnUp : 0) | (b->quantized() ? kInt8 : 0) | (grouped ? kPredictorInt8 : 0) |
                              (extended ? kShaped : 0) | (extended && rows == 3 && (flags & kShaped) ? kSecond : 0);
  if ((flags & ~known) != 0) return damaged("flags", "those of " + text(known), text(flags));
  if (!(b->threshold >= 0)) return damaged("threshold", "0 or more", std::to_string(b->threshold));
  const Problem numbers = extended ? parse_shaping(in, flags, b) : Problem();
  if (numbers) return numbers;
  if (form == 0) return parse_tensors(in, b);
  if (n_hot == neurons) return damaged("predictor", "none where all neurons are hot", text(form));
  if (lowrank ? rank == 0 || rank > kMost : rank != 0) return damaged("rank", "that of the predictor", text(rank));
  if (std::isnan(b->cut) || (!lowrank && !(b->cut >= 0 && std::isfinite(b->cut))))
    return damaged("cut", "a threshold or a margin", std::to_string(b->cut));
  return parse_tensors(in, b);
}

}  // namespace

Problem parse_blob(const void* data, std::size_t bytes, Blob* blob) {
  *blob = Blob();
  const auto* p = static_cast<const unsigned char*>(data);
  if (bytes != kBlobBytes) return damaged("size", text(kBlobBytes) + " bytes", text(bytes));
  const Reader in{p};
  if (std::memcmp(p, kMagic, sizeof(kMagic)) != 0) return damaged("magic", "PI2BLOB", "other bytes");
  const std::uint32_t version = in.u32(kVersion);
  if (version < kLayerVersion || version > kExtendedVersion)
    return problem(Fault::kIncompatible, "delegate blob, version", "1 to 3", text(version),
                   "Run it with the torch_pi2 that exported it, or export it again.");
  std::vector<unsigned char> copy(p, p + bytes);
  std::memset(copy.data() + 12, 0, 4);
  if (crc32c(copy.data(), copy.size()) != in.u32(12)) return damaged("checksum", "that of its bytes", "another");
  if (in.u32(16) != kBlobBytes) return damaged("size", text(kBlobBytes), text(in.u32(16)));
  if (in.u32(20) > static_cast<std::uint32_t>(Role::kCollect)) return damaged("role", "0 to 2", text(in.u32(20)));
  blob->role = static_cast<Role>(in.u32(20));
  blob->store_bytes = in.u64(24);
  if (blob->store_bytes > std::uint64_t{1} << 62)
    return damaged("size of the store", "one that a file can have", text(blob->store_bytes));
  blob->header_checksum = in.u32(32);
  blob->layer = in.u32(36);
  std::memcpy(blob->model_hash.data(), p + 40, blob->model_hash.size());
  blob->queue = in.u32(kQueue);
  if (blob->role == Role::kWhole ? blob->queue != 0 || in.u32(100) != 0 : false)
    return damaged("role", "no queue and no accelerator for a whole layer",
                   "queue " + text(blob->queue) + ", neurons from " + text(in.u32(100)));
  if (version != kLayerVersion) blob->experts = in.u32(kExperts);
  if (version == kMixtureVersion && blob->experts == 0) return damaged("experts", "1 or more", "0");
  const std::size_t zeros = version == kLayerVersion ? kName : blob->experts == 0 ? kMorePlaces + 24 : kMorePlaces;
  for (std::size_t i = kMorePlaces; i < zeros; ++i)
    if (p[i] != 0) return damaged("byte " + text(i), "0", text(p[i]));
  blob->preload_from = in.u32(kPreload);
  if (blob->preload_from > in.u32(76) || (blob->role != Role::kWhole && blob->preload_from != 0))
    return damaged("neurons to preload", "those from 0 to " + text(blob->role == Role::kWhole ? in.u32(76) : 0) + " on",
                   text(blob->preload_from));
  const Problem name = parse_name(reinterpret_cast<const char*>(p) + kName,
                                  (is_extended(in) ? kNumbers : kBlobBytes) - kName, &blob->store);
  return name ? name : parse_layer(in, blob);
}

}  // namespace pi2::et
