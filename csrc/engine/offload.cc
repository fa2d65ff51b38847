#include "pi2/offload.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "base/trace.h"
#include "engine/arranger.h"
#include "engine/call.h"
#include "engine/common.h"
#include "engine/prefetch.h"
#include "engine/read_ahead.h"
#include "engine/reads.h"
#include "engine/residents.h"

namespace pi2 {
namespace {

constexpr char kShorter[] = "the file has become shorter since it was opened";

}  // namespace

// The pieces of an open store, which decide with the lock, and whoever calls them: workers of a call for whose neurons
// it is the source, and threads that read.
struct Offload::State final : NeuronSource, ReadSink {
  Common common;
  Turns turns;
  Reads reads{common, *this};
  Residents residents{common};
  ReadAhead ahead{common, reads, residents};
  Call call{common, reads, ahead, residents};
  Prefetch prefetch{common, reads, residents, call};
  Arranger arranger{common, turns, reads, residents, call};
  const std::function<void()>* then = nullptr;
  std::int64_t evictions_before PI2_GUARDED_BY(kLock) = 0;

  ~State() override {
    arranger.stop();
    reads.close();
  }

  std::string set_up(const std::string& path);
  std::string compute(std::int64_t layer, const std::function<void()>& body, int threads, CallStats* stats);
  OffloadStats stats(bool reset);

  void leave_out_missing(std::uint8_t* active, std::int64_t tokens, std::int64_t n_hot) override;
  void expect(std::int64_t n_chunks, bool stream, bool last) override;
  void begin(const std::int64_t* ids, const std::int64_t* counts, std::int64_t chunk_size, std::int64_t n_chunks,
             const std::uint8_t* keep) override;
  std::int64_t next() override;
  void done(std::int64_t chunk) override;
  const char* const* neuron_rows() const override { return call.neuron_rows(); }
  bool failed() const override { return call.broken(); }

  bool over(const ReadRun& run, const Wrong& wrong) noexcept override PI2_REQUIRES(kLock);
  void some_over() noexcept override PI2_REQUIRES(kLock);
};

namespace {

bool is_share(double number) { return number >= 0 && number <= 1; }

// Within what the core can count, and "" or what is wrong with them.
std::string checked(OffloadOptions* options, CachePolicy* policy, DeviceModel* device) {
  std::string wrong = policy_of(options->policy, policy);
  if (!wrong.empty()) return "policy: " + wrong;
  const bool map = options->engine == "mmap";
  if (!map && !is_read_engine(options->engine))
    return "engine: expected " + read_engine_choices(nullptr, "mmap") + ", found '" + options->engine + "'";
  if (options->cache_bytes < 0 || options->io_threads < 1 || options->in_flight < 1 || options->window < 0 ||
      options->gap_bytes < 0 || !(options->miss_margin >= 0) || !is_share(options->drop_experts) ||
      !is_share(options->hot_share))
    return "options: expected no negative sizes, at least one thread and chunk in flight, and shares of 0 to 1";
  options->in_flight = std::min(options->in_flight, kChunks);  // a layer has no more
  options->window = std::min<std::int64_t>(options->window, 1 << 30);
  options->run_bytes = std::min<std::int64_t>(options->run_bytes, 1 << 30);
  options->gap_bytes = std::min<std::int64_t>(options->gap_bytes, 1 << 24);
  options->io_threads = std::min(options->io_threads, 1024);
  if (options->device.empty()) return "";
  wrong = DeviceModel::parse(options->device, device);
  if (!wrong.empty()) return "device: " + wrong;
  if (map) return "device: expected engine pread or io_uring, found mmap, whose reads are the system's";
  return "";
}

}  // namespace

std::string Offload::State::set_up(const std::string& path) {
  OffloadOptions& options = common.options;
  CachePolicy policy;
  DeviceModel device;
  std::string wrong = checked(&options, &policy, &device);
  if (wrong.empty()) wrong = common.layout.open(path, options.direct, options.engine == "mmap");
  if (!wrong.empty()) return wrong;
  {
    const Locked lock(common.mutex);
    wrong = common.places.set_up(common.layout, options, policy);
    if (!wrong.empty()) return wrong;
    residents.set_up();
    ahead.set_up();
    call.set_up();
  }
  return common.layout.mapped() != nullptr ? "" : reads.open(std::move(device));
}

std::string Offload::State::compute(std::int64_t layer, const std::function<void()>& body, int threads,
                                    CallStats* stats) {
  if (common.forked()) return kForked;
  // Of what is mapped the system would say so by a signal: as it does if that happens during this call.
  if (common.layout.mapped() != nullptr && common.layout.file().is_shorter()) return kShorter;
  const std::unique_lock<std::mutex> turn = turns.take();
  const Clock::time_point start = Clock::now();
  {
    const Locked lock(common.mutex);
    call.start(layer);
  }
  try {
    body();
  } catch (...) {  // no memory: what was asked for must not be taken for read
    const Locked lock(common.mutex);
    call.abandon();
    arranger.wake();
    throw;
  }
  const Locked lock(common.mutex);
  call.end();
  arranger.wake();
  if (stats != nullptr) call.add_to(stats);
  ++common.sums.calls;
  common.sums.busy_ns += since(start) * threads;
  return call.broken() ? call.problem().words() : "";
}

void Offload::State::leave_out_missing(std::uint8_t* active, std::int64_t tokens, std::int64_t n_hot) {
  if (tokens >= kStreamFrom || common.layout.mapped() != nullptr) return;  // all of a layer is read, or there
  const Locked lock(common.mutex);
  call.leave_out_missing(active, tokens, n_hot);
}

void Offload::State::expect(std::int64_t n_chunks, bool stream, bool last) {
  const Locked lock(common.mutex);
  call.expect(n_chunks, stream, last);
}

void Offload::State::begin(const std::int64_t* ids, const std::int64_t* counts, std::int64_t chunk_size,
                           std::int64_t n_chunks, const std::uint8_t* keep) {
  try {
    const TraceSpan span(Stage::kBegin, call.layer(), n_chunks);
    const Locked lock(common.mutex);
    call.begin(ids, counts, chunk_size, keep);
    arranger.wake();
  } catch (...) {  // a worker's thread: nobody would catch it
    const Locked lock(common.mutex);
    call.fail(kNoMemory);
  }
  if (then == nullptr || call.broken()) return;
  try {
    (*then)();
  } catch (...) {  // a guess less
  }
}

std::int64_t Offload::State::next() {
  const Locked lock(common.mutex);
  return call.next();
}

void Offload::State::done(std::int64_t chunk) {
  const Locked lock(common.mutex);
  try {
    call.done(chunk);
    arranger.wake();
  } catch (...) {
    call.fail(kNoMemory);
  }
}

bool Offload::State::over(const ReadRun& run, const Wrong& wrong) noexcept {
  const ReadBatch& batch = *run.batch;
  const Wanted* wanted = batch.wanted.data() + run.first;
  if (batch.arranging) arranger.over(run.count);
  if (batch.arranging && wrong) common.recording.lose();
  bool ready = false;
  for (std::int64_t k = 0; k < run.count; ++k) {
    const std::int64_t place = wanted[k].place;
    const std::int64_t waiter = common.places.end(place);
    if (wrong) {
      common.places.empty(common.layout.key_of(batch.layer) + wanted[k].in_file, place);
      ahead.lose(batch.layer, wanted[k]);
    }
    if (common.places.end_dropped(wanted[k].place) || waiter < 0) continue;
    ready = call.arrived(waiter, wanted[k], batch.asked_for, wrong) || ready;
  }
  if (wrong) arranger.wake();
  return ready || call.broken();
}

void Offload::State::some_over() noexcept {
  arranger.wake();
  call.ask_again();
}

OffloadStats Offload::State::stats(bool reset) {
  const Locked lock(common.mutex);
  reads.add_up_time();
  NeuronCache& cache = common.places.cache();
  OffloadStats stats = common.sums;
  stats.evictions = cache.evictions() - evictions_before;
  stats.resident = cache.used();
  stats.slots = cache.slots();
  stats.fixed = cache.fixed();
  stats.arranging = arranger.left();
  stats.cache_bytes = stats.slots * common.places.bytes();
  stats.staging_bytes = common.places.spares() * common.places.bytes();
  stats.late = reset ? reads.late().exchange(0) : reads.late().load();
  if (reset) {
    common.sums = OffloadStats();
    evictions_before = cache.evictions();
  }
  return stats;
}

Offload::Offload(std::unique_ptr<State> state) : state_(std::move(state)) {}
// In a forked child the engine's threads do not exist, and locks may be held by them: nothing can be taken down there.
Offload::~Offload() {
  if (state_ != nullptr && state_->common.forked()) (void)state_.release();
}

std::unique_ptr<Offload> Offload::open(const std::string& path, const OffloadOptions& options, std::string* problem) {
  auto state = std::make_unique<State>();
  state->common.options = options;
  *problem = state->set_up(path);
  if (!problem->empty()) return nullptr;
  return std::unique_ptr<Offload>(new Offload(std::move(state)));
}

std::int64_t Offload::layers() const { return state_->common.layout.count(); }

FfnArgs Offload::shape(std::int64_t layer) const {
  const StoreLayer& l = state_->common.layout.about(layer);
  FfnArgs args;
  args.hidden = l.hidden;
  args.neurons = l.neurons;
  args.chunk = l.chunk;
  args.rows = l.rows;
  args.w_dtype = l.w_dtype;
  args.down_dtype = l.down_dtype;
  args.other_down = l.other_down;
  args.n_hot = l.n_hot;
  return args;
}

std::string Offload::ffn(std::int64_t layer, const Predictor& predictor, FfnArgs args, const ParallelFor& parallel,
                         const std::function<void()>& then, CallStats* stats) {
  const auto body = [&] {
    state_->then = then ? &then : nullptr;
    args.source = state_.get();
    args.layer = layer;
    args.owner = this;
    predicted_ffn(predictor, args, parallel);
  };
  return state_->compute(layer, body, std::max(1, parallel.threads), stats);
}

void Offload::prefetch(std::int64_t layer, std::int64_t n_hot, const std::uint8_t* active, std::int64_t tokens,
                       CallStats* stats) {
  state_->prefetch(layer, n_hot, active, tokens, stats);
}

bool Offload::mostly_missing(std::int64_t layer, std::int64_t n_hot, const std::uint8_t* active, std::int64_t tokens) {
  return state_->prefetch.mostly_missing(layer, n_hot, active, tokens);
}

void Offload::leave_out_experts(std::int64_t choices) {
  const Locked lock(state_->common.mutex);
  state_->common.sums.experts_left_out += choices;
}

void Offload::leave_out(const std::vector<std::int64_t>& first) { state_->arranger.leave_out(first); }

std::string Offload::preload() { return state_->arranger.preload(); }

std::string Offload::resize(std::int64_t cache_bytes, double hot_share) {
  return state_->arranger.resize(cache_bytes, hot_share);
}

std::string Offload::arrange(const std::vector<std::int64_t>& resident, std::int64_t cache_bytes) {
  return state_->arranger.arrange(resident, cache_bytes);
}

std::string Offload::record_accesses(std::int64_t most_bytes) {
  if (state_->common.forked()) return kForked;
  auto log = std::make_unique<AccessLog>(most_bytes);
  const Locked lock(state_->common.mutex);
  if (state_->common.recording.on()) return "accesses are being recorded already";
  state_->common.recording.begin(std::move(log), state_->residents.settled());
  return "";
}

Accesses Offload::take_accesses() {
  if (state_->common.forked()) return Accesses();
  const Locked lock(state_->common.mutex);
  return state_->common.recording.take();
}

OffloadStats Offload::stats(bool reset) { return state_->common.forked() ? OffloadStats() : state_->stats(reset); }

double Offload::miss_margin() const { return state_->common.options.miss_margin; }

double Offload::drop_experts() const { return state_->common.options.drop_experts; }

std::string Offload::describe() const {
  if (state_->common.layout.mapped() != nullptr) return "mmap";
  return std::string(state_->reads.name()) + (state_->common.layout.file().direct() ? ", direct" : ", page cache");
}

}  // namespace pi2
