#include "pi2/offload.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "base/trace.h"
#include "engine/cache_rebalancer.h"
#include "engine/common.h"
#include "engine/demand_reads.h"
#include "engine/hot_set.h"
#include "engine/prefetch.h"
#include "engine/read_ahead.h"
#include "engine/reads.h"

namespace pi2 {
namespace {

constexpr char kShorter[] = "the file has become shorter since it was opened";

}  // namespace

// The parts of an open store, and their callers: the workers of a call, for which this is the source of neurons, and
// I/O threads. Decisions are made with the lock held.
struct Offload::State final : NeuronSource, ReadSink {
  Common common;
  Turns turns;
  Reads reads{common, *this};
  HotSet hot_set{common};
  ReadAhead ahead{common, reads, hot_set};
  DemandReads demand{common, reads, ahead, hot_set};
  Prefetch prefetch{common, reads, hot_set, demand};
  CacheRebalancer rebalancer{common, turns, reads, hot_set, demand};
  const std::function<void()>* then = nullptr;
  std::vector<GateBuffer> free_gates PI2_GUARDED_BY(kLock);
  std::int64_t evictions_before PI2_GUARDED_BY(kLock) = 0;

  ~State() override {
    rebalancer.stop();
    reads.close();
  }

  std::string set_up(const std::string& path);
  std::string compute(std::int64_t layer, const std::function<void()>& body, int threads, CallStats* stats);
  OffloadStats stats(bool reset);
  StoredGates ask_for_gates(std::int64_t layer, CallStats* stats);
  void wait_for(const GateBuffer& gates) PI2_REQUIRES(kLock);

  void leave_out_missing(std::uint8_t* active, std::int64_t tokens, std::int64_t n_hot) override;
  void expect(std::int64_t n_chunks, bool stream, bool last) override;
  void begin(const std::int64_t* ids, const std::int64_t* counts, std::int64_t chunk_size, std::int64_t n_chunks,
             const std::uint8_t* keep) override;
  std::int64_t next() override;
  void done(std::int64_t chunk) override;
  const char* const* neuron_rows() const override { return demand.neuron_rows(); }
  bool failed() const override { return demand.broken(); }

  bool over(const ReadRun& run, const ReadError& wrong) noexcept override PI2_REQUIRES(kLock);
  void some_over() noexcept override PI2_REQUIRES(kLock);
};

namespace {

bool is_share(double number) { return number >= 0 && number <= 1; }

// Clamps options to what the core can count. Returns "" or an error message.
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
  options->in_flight = std::min(options->in_flight, kChunks);  // a layer has no more chunks
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
    hot_set.set_up();
    ahead.set_up();
    demand.set_up();
  }
  return common.layout.mapped() != nullptr ? "" : reads.open(std::move(device));
}

std::string Offload::State::compute(std::int64_t layer, const std::function<void()>& body, int threads,
                                    CallStats* stats) {
  if (common.forked()) return kForked;
  // Reading a mapped file beyond its end raises a signal; that still happens if the file shrinks during this call.
  if (common.layout.mapped() != nullptr && common.layout.file().is_shorter()) return kShorter;
  const std::unique_lock<std::mutex> turn = turns.take();
  const Clock::time_point start = Clock::now();
  {
    const Locked lock(common.mutex);
    demand.start(layer);
  }
  try {
    body();
  } catch (...) {  // no memory: requested neurons must not count as read
    const Locked lock(common.mutex);
    demand.abandon();
    rebalancer.wake();
    throw;
  }
  const Locked lock(common.mutex);
  demand.end();
  rebalancer.wake();
  if (stats != nullptr) demand.add_to(stats);
  ++common.sums.calls;
  common.sums.busy_ns += since(start) * threads;
  return demand.broken() ? demand.problem().message() : "";
}

void Offload::State::leave_out_missing(std::uint8_t* active, std::int64_t tokens, std::int64_t n_hot) {
  if (tokens >= kStreamFrom || common.layout.mapped() != nullptr) return;  // the whole layer is read, or is mapped
  const Locked lock(common.mutex);
  demand.leave_out_missing(active, tokens, n_hot);
}

void Offload::State::expect(std::int64_t n_chunks, bool stream, bool last) {
  const Locked lock(common.mutex);
  demand.expect(n_chunks, stream, last);
}

void Offload::State::begin(const std::int64_t* ids, const std::int64_t* counts, std::int64_t chunk_size,
                           std::int64_t n_chunks, const std::uint8_t* keep) {
  try {
    const TraceSpan span(Stage::kBegin, demand.layer(), n_chunks);
    const Locked lock(common.mutex);
    demand.begin(ids, counts, chunk_size, keep);
    rebalancer.wake();
  } catch (...) {  // a worker thread, where nothing catches exceptions
    const Locked lock(common.mutex);
    demand.fail(kNoMemory);
  }
  if (then == nullptr || demand.broken()) return;
  try {
    (*then)();
  } catch (...) {  // prefetch is optional
  }
}

std::int64_t Offload::State::next() {
  const Locked lock(common.mutex);
  return demand.next();
}

void Offload::State::done(std::int64_t chunk) {
  const Locked lock(common.mutex);
  try {
    demand.done(chunk);
    rebalancer.wake();
  } catch (...) {
    demand.fail(kNoMemory);
  }
}

StoredGates Offload::State::ask_for_gates(std::int64_t layer, CallStats* stats) {
  if (common.forked() || common.layout.mapped() != nullptr) return nullptr;
  try {
    const StoredGates gates(new GateBuffer, [this](GateBuffer* over) {
      const std::unique_ptr<GateBuffer> buffer(over);
      const Locked lock(common.mutex);
      wait_for(*buffer);
      try {
        free_gates.push_back(std::move(*buffer));
      } catch (const std::bad_alloc&) {  // its memory is freed
      }
    });
    auto batch = std::make_unique<ReadBatch>();
    batch->layer = layer;
    batch->asked_for = false;
    batch->gates = gates.get();
    const Locked lock(common.mutex);
    if (!free_gates.empty()) {
      *gates = std::move(free_gates.back());
      free_gates.pop_back();
    }
    gates->wrong = {};
    if (!gates->reserve(common.layout.about(layer).gate_bytes())) return nullptr;
    reads.plan(batch.get());
    reads.submit(std::move(batch), stats);  // if that fails, so does gates_there()
    return gates;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void Offload::State::wait_for(const GateBuffer& gates) {
  const Clock::time_point start = Clock::now(), give_up = common.spin_until(start);
  while (gates.left > 0) common.mutex.wait_for_news(give_up);
  common.sums.wait_ns += since(start);
}

bool Offload::State::over(const ReadRun& run, const ReadError& wrong) noexcept {
  const ReadBatch& batch = *run.batch;
  if (batch.gates != nullptr) {
    if (wrong && !batch.gates->wrong) batch.gates->wrong = wrong;
    return --batch.gates->left == 0;
  }
  const Wanted* wanted = batch.wanted.data() + run.first;
  if (batch.arranging) rebalancer.over(run.count);
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
    ready = demand.arrived(waiter, wanted[k], batch.asked_for, wrong) || ready;
  }
  if (wrong) rebalancer.wake();
  return ready || demand.broken();
}

void Offload::State::some_over() noexcept {
  rebalancer.wake();
  demand.retry_reads();
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
  stats.arranging = rebalancer.left();
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
// A forked child has none of the engine's threads, and locks may be held by them: there it destroys nothing.
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
  const StoreLayer& about = state_->common.layout.about(layer);
  const char* const mapped = state_->common.layout.mapped();
  Predictor by = predictor;
  StoredGates gates;
  if (about.gates != 0) {
    if (args.gate_rows == nullptr && predictor.kind == Predictor::Kind::kGate)
      args.gate_rows = static_cast<const char*>(predictor.gate_rows);
    if (args.gate_rows == nullptr && mapped != nullptr) args.gate_rows = mapped + about.gates;
    if (args.gate_rows == nullptr) {
      if (state_->common.forked()) return kForked;
      gates = ask_for_gates(layer, stats);
      std::string problem;
      args.gate_rows = gates_there(gates, &problem);
      if (!problem.empty()) return problem;
    }
    if (by.kind == Predictor::Kind::kNone && args.active == nullptr && !args.shaping.cuts()) {
      by.kind = Predictor::Kind::kGate;
      by.gate_rows = args.gate_rows;
    }
  }
  const auto body = [&] {
    state_->then = then ? &then : nullptr;
    args.source = state_.get();
    args.layer = layer;
    args.owner = this;
    predicted_ffn(by, args, parallel);
  };
  return state_->compute(layer, body, std::max(1, parallel.threads), stats);
}

bool Offload::gates_apart(std::int64_t layer) const { return state_->common.layout.about(layer).gates != 0; }

StoredGates Offload::ask_for_gates(std::int64_t layer, CallStats* stats) { return state_->ask_for_gates(layer, stats); }

const char* Offload::gates_there(const StoredGates& gates, std::string* problem) {
  ReadError wrong = kNoMemory;
  if (gates != nullptr) {
    const Locked lock(state_->common.mutex);
    state_->wait_for(*gates);
    wrong = gates->wrong;
  }
  *problem = wrong.message();
  return wrong ? nullptr : gates->data.get();
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

void Offload::leave_out(const std::vector<std::int64_t>& first) { state_->rebalancer.leave_out(first); }

std::string Offload::preload() { return state_->rebalancer.preload(); }

std::string Offload::resize(std::int64_t cache_bytes, double hot_share) {
  return state_->rebalancer.resize(cache_bytes, hot_share);
}

std::string Offload::arrange(const std::vector<std::int64_t>& resident, std::int64_t cache_bytes) {
  return state_->rebalancer.arrange(resident, cache_bytes);
}

std::string Offload::record_accesses(std::int64_t most_bytes) {
  if (state_->common.forked()) return kForked;
  auto log = std::make_unique<AccessLog>(most_bytes);
  const Locked lock(state_->common.mutex);
  if (state_->common.recording.on()) return "accesses are being recorded already";
  state_->common.recording.begin(std::move(log), state_->hot_set.settled());
  return "";
}

Accesses Offload::take_accesses() {
  if (state_->common.forked()) return Accesses();
  const Locked lock(state_->common.mutex);
  return state_->common.recording.take();
}

std::string Offload::prioritise(std::int64_t layer, const float* values) {
  Common& common = state_->common;
  if (common.forked()) return kForked;
  if (common.layout.mapped() != nullptr) return "mmap: expected pread or io_uring, found no cache";
  std::vector<float> of_slots;
  const StoreLayer& l = common.layout.about(layer);
  for (std::int64_t i = 0; values != nullptr && i < l.neurons; ++i) {
    if (i % l.cluster == 0) of_slots.push_back(values[i]);
    of_slots.back() = std::max(of_slots.back(), values[i]);
  }
  const Locked lock(common.mutex);
  common.recording.lose();
  NeuronCache& cache = common.places.cache();
  if (values == nullptr) cache.forget_priorities();
  if (values != nullptr) cache.prioritise(common.layout.key_of(layer), of_slots);
  return "";
}

OffloadStats Offload::stats(bool reset) { return state_->common.forked() ? OffloadStats() : state_->stats(reset); }

double Offload::miss_margin() const { return state_->common.options.miss_margin; }

double Offload::drop_experts() const { return state_->common.options.drop_experts; }

std::string Offload::describe() const {
  if (state_->common.layout.mapped() != nullptr) return "mmap";
  return std::string(state_->reads.name()) + (state_->common.layout.file().direct() ? ", direct" : ", page cache");
}

}  // namespace pi2
