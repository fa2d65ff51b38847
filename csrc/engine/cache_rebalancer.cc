#include "engine/cache_rebalancer.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <system_error>
#include <utility>

#include "base/thread_name.h"
#include "base/trace.h"

namespace pi2 {
namespace {

constexpr std::int64_t kArrangingBytes = 1 << 20;  // in flight at most while no call waits for reads
constexpr char kMapped[] = "engine: expected pread or io_uring, found mmap, whose pages the system caches";

// Increments `paused` for its lifetime. The lock must be held at construction and destruction.
class Pause {
 public:
  explicit Pause(int* paused) : paused_(paused) { ++*paused_; }
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;
  ~Pause() { --*paused_; }

 private:
  int* paused_;
};

// A batch for the slots of `piece` from `first` on.
std::unique_ptr<ReadBatch> batch_for(const RebalancePlan::Piece& piece, std::int64_t first) {
  auto batch = std::make_unique<ReadBatch>();
  batch->wanted.reserve(static_cast<std::size_t>(piece.last - first));
  batch->layer = piece.layer;
  batch->asked_for = false;
  batch->arranging = true;
  return batch;
}

}  // namespace

void CacheRebalancer::stop() {
  if (!thread_.joinable()) return;
  {
    const Locked lock(common_.mutex);
    ending_ = true;
  }
  work_.notify_one();
  thread_.join();
}

bool CacheRebalancer::start() {
  if (thread_.joinable()) return true;
  try {
    thread_ = std::thread([this] { run(); });
    name_thread(thread_, "pi2-arrange");
  } catch (const std::system_error&) {
    return false;
  }
  return true;
}

std::string CacheRebalancer::resize(std::int64_t cache_bytes, double hot_share) {
  if (common_.forked()) return kForked;
  if (common_.layout.mapped() != nullptr) return kMapped;
  const std::unique_lock<std::mutex> turn = turns_.take();
  const Locked lock(common_.mutex);
  const std::string wrong = hot_set_.refused_size(cache_bytes);
  if (!wrong.empty()) return wrong;
  if (!(hot_share >= 0 && hot_share <= 1)) return "hot_share: expected 0 to 1, found " + std::to_string(hot_share);
  {
    const Pause pause(&paused_);
    while (reads_.under_way() > 0) common_.mutex.wait_for_news();
    hot_set_.resize(hot_set_.slots_for(cache_bytes), hot_share);
  }
  wake();
  return "";
}

std::string CacheRebalancer::wrong_numbers(const std::vector<std::int64_t>& neurons) const {
  const std::vector<StoreLayer>& layers = common_.layout.layers();
  if (neurons.size() != layers.size())
    return "resident: expected " + std::to_string(layers.size()) + " numbers, one of each layer, found " +
           std::to_string(neurons.size());
  for (std::size_t l = 0; l < layers.size(); ++l)
    if (neurons[l] < 0 || neurons[l] > layers[l].neurons)
      return "resident: expected 0 to " + std::to_string(layers[l].neurons) + " neurons of layer " + std::to_string(l) +
             ", found " + std::to_string(neurons[l]);
  return "";
}

std::string CacheRebalancer::arrange(const std::vector<std::int64_t>& neurons, std::int64_t cache_bytes) {
  if (common_.forked()) return kForked;
  if (common_.layout.mapped() != nullptr) return kMapped;
  std::string wrong = wrong_numbers(neurons);
  if (!wrong.empty()) return wrong;
  std::vector<std::int64_t> wanted = neurons;
  const Locked lock(common_.mutex);
  std::unique_lock<std::mutex> turn;
  if (cache_bytes != Offload::kSameSize) {
    wrong = hot_set_.refused_size(cache_bytes);
    if (!wrong.empty()) return wrong;
    if (hot_set_.slots_for(cache_bytes) != common_.places.cache().slots()) {  // between two calls
      common_.mutex.unlock();
      turn = turns_.take();
      common_.mutex.lock();
    }
  }
  if (!start()) return "no thread could be started for reading";
  if (common_.recording.on()) common_.recording.lose();
  if (turn.owns_lock()) {
    const Pause pause(&paused_);
    while (reads_.under_way() > 0) common_.mutex.wait_for_news();
    hot_set_.arrange(std::move(wanted), hot_set_.slots_for(cache_bytes));
  } else {
    hot_set_.arrange(std::move(wanted), common_.places.cache().slots());
  }
  wake();
  return "";
}

void CacheRebalancer::leave_out(const std::vector<std::int64_t>& first) {
  if (common_.forked()) return;
  const std::unique_lock<std::mutex> turn = turns_.take();
  const Locked lock(common_.mutex);
  std::vector<std::int64_t> slots;
  for (std::size_t l = 0; l < common_.layout.layers().size(); ++l)
    slots.push_back(first[l] / common_.layout.layers()[l].cluster);
  hot_set_.leave_out(std::move(slots));
  wake();
}

std::string CacheRebalancer::preload() {
  if (common_.forked()) return kForked;
  const std::unique_lock<std::mutex> turn = turns_.take();
  const Locked lock(common_.mutex);
  if (common_.layout.mapped() != nullptr) return "";
  std::string wrong = hot_set_.preload();
  wake();
  return wrong;
}

void CacheRebalancer::wake() noexcept {
  blocked_ = false;
  if (!hot_set_.settled() && may_go_on()) work_.notify_one();
}

std::int64_t CacheRebalancer::left() const {
  return hot_set_.settled() ? 0 : std::max<std::int64_t>(1, hot_set_.rebalance_plan().left() + reading_);
}

// Calls have priority: no background read starts while a call has neurons whose reads could not start yet, and only one
// at a time while a call waits for its reads.
bool CacheRebalancer::may_go_on() const {
  if (hot_set_.settled() || blocked_ || paused_ > 0 || demand_.wants_places()) return false;
  if (!hot_set_.rebalance_plan().pending()) return reading_ == 0;
  return reading_ == 0 || (reads_.asked_for() == 0 && reading_ * common_.places.bytes() < kArrangingBytes);
}

void CacheRebalancer::run() {
  trace_io_thread();
  StoreMutex& mutex = common_.mutex;
  const Locked lock(mutex);
  for (;;) {
    while (!ending_ && !may_go_on()) mutex.wait(&work_);
    if (ending_) return;
    if (!hot_set_.rebalance_plan().pending()) {
      hot_set_.settle();
      continue;
    }
    std::unique_ptr<ReadBatch> batch = some();
    if (batch != nullptr) {
      reads_.submit(std::move(batch), nullptr);  // if this fails, the first call that needs a neuron reads it
    } else {
      mutex.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(20));  // lets waiting calls take the lock
      mutex.lock();
    }
  }
}

// Does a few steps of the plan. Returns the reads that these need, or null.
std::unique_ptr<ReadBatch> CacheRebalancer::some() {
  RebalancePlan& plan = hot_set_.rebalance_plan();
  std::unique_ptr<ReadBatch> batch;
  RebalancePlan::Piece piece;
  for (std::int64_t seen = 0; seen < HotSet::kMostAtOnce && batch == nullptr && !blocked_ && plan.next(&piece);) {
    seen += piece.last - piece.first;
    if (piece.release)
      hot_set_.release(piece);
    else
      batch = bring(piece);
  }
  return batch;
}

// Fixes the slots of `piece` that are in the cache. Returns reads of the others, or null.
std::unique_ptr<ReadBatch> CacheRebalancer::bring(const RebalancePlan::Piece& piece) {
  RebalancePlan& plan = hot_set_.rebalance_plan();
  std::unique_ptr<ReadBatch> batch;
  try {
    plan.done(piece, bring_until(piece, &batch));
    if (batch == nullptr || batch->wanted.empty()) return nullptr;
    reads_.plan(batch.get());
  } catch (...) {  // the first call that needs a neuron reads it
    if (batch == nullptr) plan.done(piece, piece.last);
    if (batch != nullptr)
      for (const Wanted& w : batch->wanted)
        common_.places.empty(common_.layout.key_of(piece.layer) + w.in_file, w.place);
    common_.recording.lose();
    return nullptr;
  }
  reading_ += static_cast<std::int64_t>(batch->wanted.size());
  return batch;
}

// Adds slots that are not in the cache to the batch, with a place for each. Returns the first slot that was not
// handled.
std::int64_t CacheRebalancer::bring_until(const RebalancePlan::Piece& piece, std::unique_ptr<ReadBatch>* batch) {
  NeuronCache& cache = common_.places.cache();
  const std::int64_t key = common_.layout.key_of(piece.layer);
  std::int64_t in_file = piece.first;
  for (; in_file < piece.last; ++in_file) {
    if (cache.contains(key + in_file)) {
      cache.fix(key + in_file, true);
      continue;
    }
    if (*batch == nullptr) *batch = batch_for(piece, in_file);
    std::vector<Wanted>& wanted = (*batch)->wanted;
    std::int64_t place = cache.insert(key + in_file, true);
    if (place < 0 && !demand_.under_way()) {
      cache.begin();  // ends the pins of the last call
      place = cache.insert(key + in_file, true);
    }
    if (place < 0 && (demand_.under_way() || reads_.under_way() > 0 || !wanted.empty())) {
      blocked_ = true;
      break;
    }
    if (place < 0) {
      common_.recording.lose();
      continue;
    }
    common_.places.begin(place, false);
    wanted.push_back({in_file, static_cast<std::int32_t>(place)});
  }
  return in_file;
}

}  // namespace pi2
