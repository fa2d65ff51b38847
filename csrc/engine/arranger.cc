#include "engine/arranger.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <system_error>
#include <utility>

#include "base/thread_name.h"
#include "base/trace.h"

namespace pi2 {
namespace {

constexpr std::int64_t kArrangingBytes = 1 << 20;  // that may be on the way while no call waits for reads
constexpr char kMapped[] = "engine: expected pread or io_uring, found mmap, whose memory is the system's";

// As long as this lives, `paused` is larger by one; the lock is held when it begins and when it ends.
class Pause {
 public:
  explicit Pause(int* paused) : paused_(paused) { ++*paused_; }
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;
  ~Pause() { --*paused_; }

 private:
  int* paused_;
};

// For slots of a piece from this one on.
std::unique_ptr<ReadBatch> batch_for(const Arrangement::Piece& piece, std::int64_t first) {
  auto batch = std::make_unique<ReadBatch>();
  batch->wanted.reserve(static_cast<std::size_t>(piece.last - first));
  batch->layer = piece.layer;
  batch->asked_for = false;
  batch->arranging = true;
  return batch;
}

}  // namespace

void Arranger::stop() {
  if (!thread_.joinable()) return;
  {
    const Locked lock(common_.mutex);
    ending_ = true;
  }
  work_.notify_one();
  thread_.join();
}

bool Arranger::start() {
  if (thread_.joinable()) return true;
  try {
    thread_ = std::thread([this] { run(); });
    name_thread(thread_, "pi2-arrange");
  } catch (const std::system_error&) {
    return false;
  }
  return true;
}

std::string Arranger::resize(std::int64_t cache_bytes, double hot_share) {
  if (common_.forked()) return kForked;
  if (common_.layout.mapped() != nullptr) return kMapped;
  const std::unique_lock<std::mutex> turn = turns_.take();
  const Locked lock(common_.mutex);
  const std::string wrong = residents_.refused_size(cache_bytes);
  if (!wrong.empty()) return wrong;
  if (!(hot_share >= 0 && hot_share <= 1)) return "hot_share: expected 0 to 1, found " + std::to_string(hot_share);
  {
    const Pause pause(&paused_);
    while (reads_.under_way() > 0) common_.mutex.wait_for_news();
    residents_.resize(residents_.slots_for(cache_bytes), hot_share);
  }
  wake();
  return "";
}

std::string Arranger::wrong_numbers(const std::vector<std::int64_t>& neurons) const {
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

std::string Arranger::arrange(const std::vector<std::int64_t>& neurons, std::int64_t cache_bytes) {
  if (common_.forked()) return kForked;
  if (common_.layout.mapped() != nullptr) return kMapped;
  std::string wrong = wrong_numbers(neurons);
  if (!wrong.empty()) return wrong;
  std::vector<std::int64_t> wanted = neurons;
  const Locked lock(common_.mutex);
  std::unique_lock<std::mutex> turn;
  if (cache_bytes != Offload::kSameSize) {
    wrong = residents_.refused_size(cache_bytes);
    if (!wrong.empty()) return wrong;
    if (residents_.slots_for(cache_bytes) != common_.places.cache().slots()) {  // between two calls
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
    residents_.arrange(std::move(wanted), residents_.slots_for(cache_bytes));
  } else {
    residents_.arrange(std::move(wanted), common_.places.cache().slots());
  }
  wake();
  return "";
}

void Arranger::leave_out(const std::vector<std::int64_t>& first) {
  if (common_.forked()) return;
  const std::unique_lock<std::mutex> turn = turns_.take();
  const Locked lock(common_.mutex);
  std::vector<std::int64_t> slots;
  for (std::size_t l = 0; l < common_.layout.layers().size(); ++l)
    slots.push_back(first[l] / common_.layout.layers()[l].cluster);
  residents_.leave_out(std::move(slots));
  wake();
}

std::string Arranger::preload() {
  if (common_.forked()) return kForked;
  const std::unique_lock<std::mutex> turn = turns_.take();
  const Locked lock(common_.mutex);
  if (common_.layout.mapped() != nullptr) return "";
  std::string wrong = residents_.preload();
  wake();
  return wrong;
}

void Arranger::wake() noexcept {
  blocked_ = false;
  if (!residents_.settled() && may_go_on()) work_.notify_one();
}

std::int64_t Arranger::left() const {
  return residents_.settled() ? 0 : std::max<std::int64_t>(1, residents_.arrangement().left() + reading_);
}

// Calls come first: while one waits for what no read was begun of, nothing else is begun, and while it waits for reads,
// one at a time.
bool Arranger::may_go_on() const {
  if (residents_.settled() || blocked_ || paused_ > 0 || call_.wants_places()) return false;
  if (!residents_.arrangement().pending()) return reading_ == 0;
  return reading_ == 0 || (reads_.asked_for() == 0 && reading_ * common_.places.bytes() < kArrangingBytes);
}

void Arranger::run() {
  trace_io_thread();
  StoreMutex& mutex = common_.mutex;
  const Locked lock(mutex);
  for (;;) {
    while (!ending_ && !may_go_on()) mutex.wait(&work_);
    if (ending_) return;
    if (!residents_.arrangement().pending()) {
      residents_.settle();
      continue;
    }
    std::unique_ptr<ReadBatch> batch = some();
    if (batch != nullptr) {
      reads_.submit(std::move(batch), nullptr);  // if that fails, they are asked for when they are wanted
    } else {
      mutex.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(20));  // calls that wait for the lock get it
      mutex.lock();
    }
  }
}

// A few steps, and the reads that they take, if any.
std::unique_ptr<ReadBatch> Arranger::some() {
  Arrangement& arrangement = residents_.arrangement();
  std::unique_ptr<ReadBatch> batch;
  Arrangement::Piece piece;
  for (std::int64_t seen = 0;
       seen < Residents::kMostAtOnce && batch == nullptr && !blocked_ && arrangement.next(&piece);) {
    seen += piece.last - piece.first;
    if (piece.release)
      residents_.release(piece);
    else
      batch = bring(piece);
  }
  return batch;
}

// Slots of a piece are fixed that are there; reads of the others, or null.
std::unique_ptr<ReadBatch> Arranger::bring(const Arrangement::Piece& piece) {
  Arrangement& arrangement = residents_.arrangement();
  std::unique_ptr<ReadBatch> batch;
  try {
    arrangement.done(piece, bring_until(piece, &batch));
    if (batch == nullptr || batch->wanted.empty()) return nullptr;
    reads_.plan(batch.get());
  } catch (...) {  // they are asked for when they are wanted
    if (batch == nullptr) arrangement.done(piece, piece.last);
    if (batch != nullptr)
      for (const Wanted& w : batch->wanted)
        common_.places.empty(common_.layout.key_of(piece.layer) + w.in_file, w.place);
    common_.recording.lose();
    return nullptr;
  }
  reading_ += static_cast<std::int64_t>(batch->wanted.size());
  return batch;
}

// Places for those that are not there, into the batch; up to which slot.
std::int64_t Arranger::bring_until(const Arrangement::Piece& piece, std::unique_ptr<ReadBatch>* batch) {
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
    if (place < 0 && !call_.under_way()) {
      cache.begin();  // what the last call has used is pinned no more
      place = cache.insert(key + in_file, true);
    }
    if (place < 0 && (call_.under_way() || reads_.under_way() > 0 || !wanted.empty())) {
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
