#include "bindings/executorch/store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <tuple>

#include "base/crc32c.h"
#include "bindings/executorch/trace_file.h"
#include "io/read_fully.h"
#include "pi2/kernels.h"
#include "pi2/linear.h"
#include "store/store_file.h"

namespace pi2::et {
namespace {

constexpr const char* kOther = "Give it the store of the same bundle (option store_path, or PI2_STORE).";
constexpr const char* kAgain = "Copy the bundle again.";

// All open stores, and the numbers of opens and closes.
struct Registry {
  std::mutex mutex;
  std::multimap<std::string, std::weak_ptr<Store>> open;
  std::int64_t opens = 0, closes = 0;
};

Registry& registry() {
  static auto* const all = new Registry();  // never destroyed: programs may still be loaded while the process ends
  return *all;
}

std::string hex(const std::array<unsigned char, 32>& hash) {
  std::string out;
  for (std::size_t i = 0; i < 4; ++i)
    for (const int half : {hash[i] >> 4, hash[i] & 15}) out += "0123456789abcdef"[half];
  return out;
}

// The path of the blob's store.
std::string path_of(const Blob& blob, const Settings& settings) {
  if (settings.store_path.empty()) return blob.store;
  struct stat about;
  const bool folder = stat(settings.store_path.c_str(), &about) == 0 && S_ISDIR(about.st_mode);
  return folder ? settings.store_path + "/" + blob.store : settings.store_path;
}

// The first neuron of the layer that decoding needs.
std::int64_t wanted_from(const Blob& blob) { return blob.role == Role::kWhole ? blob.preload_from : blob.first; }

std::string json(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20)
      out += c;
    else
      out += "\\u00" + std::string(1, "0123456789abcdef"[c >> 4]) + "0123456789abcdef"[c & 15];
  }
  return out + "\"";
}

}  // namespace

std::shared_ptr<Store> Store::open(const Blob& blob, const Settings& settings, Problem* problem) {
  const std::string path = path_of(blob, settings);
  struct stat about;
  if (stat(path.c_str(), &about) != 0) {
    *problem = et::problem(Fault::kAccess, "neuron store " + path, "a file", std::strerror(errno), kOther);
    return nullptr;
  }
  // A file that was overwritten in place is another store.
  std::string key = settings.text();
  for (const auto number : {static_cast<std::int64_t>(about.st_dev), static_cast<std::int64_t>(about.st_ino),
                            static_cast<std::int64_t>(about.st_size), static_cast<std::int64_t>(about.st_mtim.tv_sec),
                            static_cast<std::int64_t>(about.st_mtim.tv_nsec)})
    key += " " + std::to_string(number);
  Registry& all = registry();
  std::shared_ptr<Store> store, fresh;  // destroyed after the lock is released: a store takes it
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto range = all.open.equal_range(key);
  for (auto at = range.first; at != range.second && store == nullptr; ++at) store = at->second.lock();
  if (store == nullptr) {
    fresh.reset(new Store());
    fresh->path_ = path;
    *problem = fresh->set_up(blob, settings);
    if (*problem) return nullptr;
    fresh->key_ = key;
    all.open.emplace(key, fresh);
    ++all.opens;
    store = fresh;
  }
  *problem = store->identify(blob);
  return *problem ? nullptr : store;
}

Store::~Store() {
  engine_.reset();
  if (!key_.empty()) {
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto range = all.open.equal_range(key_);
    for (auto at = range.first; at != range.second;) at = at->second.expired() ? all.open.erase(at) : std::next(at);
    ++all.closes;
  }
  if (tracing_) {
    offload_.reset();
    const Problem wrong = guarded("a trace", [&] { return write_trace(settings_.trace); });
    if (wrong) remember(wrong);
  }
  if (descriptor_ >= 0) ::close(descriptor_);
}

Problem Store::set_up(const Blob& blob, const Settings& settings) {
  const std::string what = "neuron store " + path_;
  settings_ = settings;
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // opening a FIFO would wait
  struct stat about;
  if (descriptor_ < 0 || fstat(descriptor_, &about) != 0)
    return problem(Fault::kAccess, what, "a file that can be read", std::strerror(errno), kOther);
  if (!S_ISREG(about.st_mode)) return problem(Fault::kAccess, what, "a file", "a folder, FIFO or device", kOther);
  file_bytes_ = about.st_size;
  unsigned char length[8] = {};
  const std::string size = std::to_string(file_bytes_) + " bytes";
  const std::string wanted = std::to_string(blob.store_bytes) + " bytes";
  if (file_bytes_ < 8 || read_fully(descriptor_, length, 8, 0) != 0)
    return problem(Fault::kAccess, what, wanted, size + " (cut short)", kAgain);
  std::uint64_t header = 0;
  for (std::size_t i = 8; i-- > 0;) header = header << 8 | length[i];
  // A different hash of the weights is a better message than different sizes.
  const bool whole = header < 100000000 && static_cast<std::int64_t>(header) <= file_bytes_ - 8 - kStorePage;
  header_bytes_ = whole ? 8 + static_cast<std::int64_t>(header) : 0;
  unsigned char head[72] = {};
  if (whole && read_fully(descriptor_, head, sizeof(head), header_bytes_) == 0 &&
      std::memcmp(head, "PI2STORE", 8) == 0) {
    std::memcpy(model_hash_.data(), head + 40, model_hash_.size());
    if (model_hash_ != blob.model_hash) return identify(blob);
  }
  if (static_cast<std::uint64_t>(file_bytes_) < blob.store_bytes)
    return problem(Fault::kAccess, what, wanted, size + " (cut short)", kAgain);
  if (static_cast<std::uint64_t>(file_bytes_) > blob.store_bytes)
    return problem(Fault::kIncompatible, what, wanted, size + " (packed otherwise)", kOther);
  if (!whole) return problem(Fault::kAccess, what, "a neuron store", "a header of other bytes", kAgain);
  std::vector<char> text(static_cast<std::size_t>(header_bytes_));
  if (read_fully(descriptor_, text.data(), header_bytes_, 0) != 0)
    return problem(Fault::kAccess, what, "its header", "an error of the device", kAgain);
  header_checksum_ = crc32c(text.data(), text.size());
  if (header_checksum_ != blob.header_checksum) return identify(blob);

  OffloadOptions options;
  options.cache_bytes = settings.cache_bytes < 0 ? std::int64_t{1} << 62 : settings.cache_bytes;
  options.policy = settings.policy;
  options.io_threads = settings.io_threads;
  options.direct = settings.direct;
  options.hot_share = settings.policy == "lru" || settings.policy == "sieve" ? 0.5 : 0.25;  // as in the Python runtime
  std::string wrong;
  for (const std::string& engine : read_engines()) {
    if (settings.engine != "auto" && settings.engine != engine) continue;
    options.engine = engine;
    offload_ = Offload::open(path_, options, &wrong);
    if (offload_ != nullptr || wrong.rfind("engine: ", 0) != 0) break;
  }
  if (offload_ == nullptr && wrong.rfind("engine: ", 0) == 0)
    return problem(Fault::kArgument, "option engine of Pi2Backend", "one that this system has", wrong, "Use auto.");
  if (offload_ == nullptr && wrong.rfind("no memory", 0) == 0)
    return problem(Fault::kMemory, what, "memory for the cache", wrong, "Give a smaller cache_bytes_kib.");
  if (offload_ == nullptr) return problem(Fault::kAccess, what, "a sound neuron store", wrong, kAgain);
  if (settings.trace.empty()) return {};
  const Problem trace = begin_trace(settings.trace);
  tracing_ = !trace;
  return trace;
}

// Whether the blob was made for this store.
Problem Store::identify(const Blob& blob) const {
  const std::string what = "neuron store " + path_;
  if (model_hash_ != blob.model_hash)
    return problem(Fault::kIncompatible, what, "weights " + hex(blob.model_hash), hex(model_hash_), kOther);
  if (static_cast<std::uint64_t>(file_bytes_) != blob.store_bytes)
    return problem(Fault::kIncompatible, what, std::to_string(blob.store_bytes) + " bytes", std::to_string(file_bytes_),
                   kOther);
  if (header_checksum_ != blob.header_checksum)
    return problem(Fault::kIncompatible, what, "the header that the .pte was exported with",
                   "another (packed otherwise, or damaged)", kOther);
  const std::int64_t last = blob.layer + blob.layers() - 1;
  if (last >= offload_->layers())
    return problem(Fault::kIncompatible, what, "layer " + std::to_string(last),
                   std::to_string(offload_->layers()) + " layers", kOther);
  std::int64_t layer = blob.layer;
  const auto fits = [&blob](const FfnArgs& found) {
    return found.hidden == blob.hidden && found.neurons == blob.neurons && found.rows == blob.rows &&
           found.w_dtype == blob.w_dtype && found.other_down == blob.other_down &&
           (!blob.other_down || found.down_dtype == blob.down_dtype);
  };
  while (layer <= last && fits(offload_->shape(layer))) ++layer;
  if (layer > last) return {};
  const FfnArgs found = offload_->shape(layer);
  const auto sizes = [](const auto& of) {
    return std::to_string(of.neurons) + " neurons of " + std::to_string(of.rows) + " rows of " +
           std::to_string(of.hidden) + " (weights " + std::to_string(static_cast<int>(of.w_dtype)) +
           (of.other_down ? " and " + std::to_string(static_cast<int>(of.down_dtype)) : "") + ")";
  };
  return problem(Fault::kIncompatible, what + ", layer " + std::to_string(layer), sizes(blob), sizes(found), kOther);
}

std::shared_ptr<const Bytes> Store::tensor(const Place& place, const char* name, Problem* problem, const Rows* blocks) {
  if (place.bytes == 0) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::weak_ptr<const Bytes>& known = tensors_[{place.offset, blocks != nullptr}];
  std::shared_ptr<const Bytes> found = known.lock();
  const auto bytes = static_cast<std::int64_t>(place.bytes);
  const std::int64_t rows = blocks == nullptr ? 0 : (blocks->count + kPanelRows - 1) / kPanelRows * kPanelRows;
  const std::int64_t size = blocks == nullptr ? bytes : rows * row_bytes(blocks->dtype, blocks->columns);
  if (found != nullptr && found->size == size) return found;
  const std::string what = "neuron store " + path_ + ", " + name + " at " + std::to_string(place.offset);
  const auto fresh = [&](std::int64_t its_size) -> std::shared_ptr<Bytes> {
    auto memory = std::make_shared<Bytes>();
    memory->size = its_size;
    if (memory->memory.allocate(its_size + 64, false)) return memory;  // kernels may read a little past the end
    *problem = no_memory(what);
    return nullptr;
  };
  std::shared_ptr<Bytes> made = fresh(bytes);
  if (made == nullptr) return nullptr;
  const int error = read_fully(descriptor_, made->memory.data(), bytes, static_cast<std::int64_t>(place.offset));
  if (error != 0) {
    *problem = et::problem(Fault::kAccess, what, std::to_string(bytes) + " bytes", std::strerror(error), kAgain);
    return nullptr;
  }
  if (crc32c(made->memory.data(), static_cast<std::size_t>(bytes)) != place.checksum) {
    *problem = et::problem(Fault::kAccess, what, "the bytes that were packed", "another checksum", kAgain);
    return nullptr;
  }
  if (blocks != nullptr) {
    std::shared_ptr<Bytes> in_blocks = fresh(size);
    if (in_blocks == nullptr) return nullptr;
    to_blocks(made->memory.data(), blocks->dtype, blocks->count, blocks->columns, in_blocks->memory.data());
    made = std::move(in_blocks);
  }
  known = made;
  return made;
}

void Store::add(const Blob& blob) {
  const std::lock_guard<std::mutex> lock(mutex_);
  first_[blob.layer].insert(wanted_from(blob));
}

void Store::remove(const Blob& blob) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& all = first_[blob.layer];
  all.erase(all.find(wanted_from(blob)));
}

void Store::warm() {
  const std::lock_guard<std::mutex> one(warming_);
  if (warm_ || !settings_.preload) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::int64_t> first(static_cast<std::size_t>(offload_->layers()), 0);
    for (const auto& [layer, all] : first_)
      if (!all.empty()) first[static_cast<std::size_t>(layer)] = *all.begin();
    offload_->leave_out(first);
  }
  // A neuron that cannot be read now is read again by the call that needs it, which reports the error.
  offload_->preload();
  warm_ = true;
}

Engine& Store::engine(int threads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (engine_ == nullptr) engine_ = std::make_unique<Engine>(settings_.threads > 0 ? settings_.threads : threads);
  return *engine_;
}

void Store::count_submit_wait(std::int64_t nanoseconds) {
  const std::lock_guard<std::mutex> lock(mutex_);
  submit_wait_ns_ += nanoseconds;
}

std::string Store::stats(bool reset) {
  const OffloadStats s = offload_->stats(reset);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::int64_t predictor_bytes = 0;
  for (const auto& [offset, tensor] : tensors_)
    if (const auto held = tensor.lock()) predictor_bytes += held->size;
  const std::int64_t place = s.slots > 0 ? s.cache_bytes / s.slots : 0;
  const std::pair<const char*, std::int64_t> numbers[] = {
      {"calls", s.calls},
      {"wanted", s.wanted},
      {"hits", s.hits},
      {"reads", s.reads},
      {"bytes_read", s.bytes_read},
      {"wait_ns", s.wait_ns},
      {"busy_ns", s.busy_ns},
      {"cache_bytes", s.cache_bytes},
      {"resident_bytes", s.resident * place},
      {"predictor_bytes", predictor_bytes},
      {"submit_wait_ns", submit_wait_ns_},
  };
  std::string out = "{\"path\": " + json(path_);
  for (const auto& [name, value] : numbers) out += std::string(", \"") + name + "\": " + std::to_string(value);
  if (reset) submit_wait_ns_ = 0;
  return out + ", \"engine\": " + json(offload_->describe()) + "}";
}

std::string all_stats(bool reset) {
  Registry& all = registry();
  std::vector<std::shared_ptr<Store>> open;  // destroyed after the lock is given back
  std::int64_t opens, closes;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto& [key, store] : all.open)
      if (auto held = store.lock()) open.push_back(std::move(held));
    opens = all.opens;
    closes = all.closes;
  }
  std::string out = "{\"stores\": [";
  for (const auto& store : open) out += (store == open.front() ? "" : ", ") + store->stats(reset);
  return out + "], \"opens\": " + std::to_string(opens) + ", \"closes\": " + std::to_string(closes) + "}";
}

}  // namespace pi2::et
