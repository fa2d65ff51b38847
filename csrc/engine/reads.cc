#include "engine/reads.h"

#include <algorithm>

#include "base/trace.h"
#include "io/simulated.h"

namespace pi2 {

std::string Reads::open(DeviceModel device) {
  const OffloadOptions& options = common_.options;
  const StoreFile& file = common_.layout.file();
  std::string wrong;
  const ReadDone told{[](void* self, const ReadResult* results, std::int64_t count) {
                        static_cast<Reads*>(self)->arrived(results, count);
                      },
                      this};
  const auto reading = [&](ReadDone done) {
    return open_read_engine(options.engine, file.descriptor(), options.io_threads, done, &wrong);
  };
  device.set_range(file.file_bytes());
  engine_ = options.device.empty() ? reading(told) : simulated_engine(device, reading, told, &late_);
  if (engine_ == nullptr) return "engine: " + options.engine + " is not available here: " + wrong;
  return "";
}

void Reads::add_up_time() {
  if (under_way_ == 0) return;
  common_.sums.io_ns += since(io_since_);
  io_since_ = Clock::now();
}

void Reads::plan(ReadBatch* batch) {
  const Layout& layout = common_.layout;
  const StoreLayer& l = layout.about(batch->layer);
  if (batch->gates != nullptr)
    batch->plan_gates(l, layout.file().unit(), common_.options.run_bytes);
  else
    batch->plan(l, layout.read_bytes(l), common_.options.run_bytes, common_.options.gap_bytes,
                [this](std::int32_t place) { return common_.places.at(place); });
  if (under_way_ == 0) io_since_ = Clock::now();
  under_way_ += batch->left;
  if (batch->asked_for) asked_for_ += batch->left;
}

void Reads::ended(const ReadBatch& batch) {
  if (--under_way_ == 0) common_.sums.io_ns += since(io_since_);
  if (batch.asked_for) --asked_for_;
}

void Reads::count(std::int64_t reads, std::int64_t bytes, CallStats* stats) {
  for (CallStats* const to : {static_cast<CallStats*>(&common_.sums), stats}) {
    if (to == nullptr) continue;
    to->reads += reads;
    to->bytes_read += bytes;
  }
}

bool Reads::submit(std::unique_ptr<ReadBatch> batch, CallStats* stats) noexcept {
  const auto n = static_cast<std::int64_t>(batch->reads.size());
  std::int64_t bytes = 0;
  for (const Read& read : batch->reads) bytes += read.bytes;
  count(n, bytes, stats);  // first: the call may have ended when the lock is taken again
  trace_counter(TraceCounter::kBytesRead, common_.sums.bytes_read);
  common_.mutex.unlock();
  batch->asked_ns = trace_time();
  bool begun = true;
  try {
    const TraceSpan span(Stage::kSubmit, batch->layer, n);
    engine_->submit(batch->reads.data(), n);
  } catch (...) {
    begun = false;
  }
  // Whoever is told of its last read deletes it, and may have.
  ReadBatch* const failed = begun ? (batch.release(), nullptr) : batch.get();
  common_.mutex.lock();
  if (failed != nullptr) {
    count(-n, -bytes, stats);
    for (std::int64_t i = 0; i < n; ++i) ended(*failed);
    failed->asked_for = true;  // a call that waits for a guess of it fails, too: nobody would ask again
    for (const ReadRun& run : failed->runs) (void)sink_.over(run, kNoMemory);
    common_.mutex.tell();
    return false;
  }
  return true;
}

// Without the lock: nobody looks at these places before they are said to be there.
ReadError Reads::check(const ReadRun& run, const ReadResult& result) const noexcept {
  const ReadBatch& batch = *run.batch;
  const Layout& layout = common_.layout;
  trace_async(Stage::kRead, batch.asked_ns, batch.layer, batch.chunk);
  const TraceSpan span(Stage::kVerify, batch.layer, batch.chunk);
  if (batch.gates != nullptr) {
    const std::int64_t at = run.first * kStorePage;
    if (result.error != 0) return {nullptr, result.error, batch.layer, 0, result.read.bytes, result.read.offset};
    if (!common_.options.verify) return {};
    return layout.check_gates(batch.layer, run.first, batch.gates->data.get() + at, result.read.bytes);
  }
  const Wanted* wanted = batch.wanted.data() + run.first;
  if (result.error != 0)
    return {nullptr,           result.error,      batch.layer, wanted->in_file * layout.about(batch.layer).cluster,
            result.read.bytes, result.read.offset};
  if (!common_.options.verify) return {};
  for (std::int64_t k = 0; k < run.count; ++k) {
    const ReadError wrong = layout.check_neurons(batch.layer, wanted[k].in_file, common_.places.at(wanted[k].place));
    if (wrong) return wrong;
  }
  return {};
}

// Runs on an I/O thread, where nothing catches exceptions: running out of memory fails the waiting call.
void Reads::arrived(const ReadResult* results, std::int64_t count) noexcept {
  ReadError wrong[64];
  for (std::int64_t first = 0; first < count; first += 64) {
    const std::int64_t n = std::min<std::int64_t>(64, count - first);
    for (std::int64_t i = 0; i < n; ++i)
      wrong[i] = check(*static_cast<const ReadRun*>(results[first + i].read.owner), results[first + i]);
    const Locked lock(common_.mutex);
    const bool were_asked_for = asked_for_ > 0;
    bool waited_for = false;
    for (std::int64_t i = 0; i < n; ++i) {
      const ReadRun& run = *static_cast<const ReadRun*>(results[first + i].read.owner);
      ReadBatch* const batch = run.batch;
      ended(*batch);
      waited_for = sink_.over(run, wrong[i]) || waited_for;
      if (--batch->left == 0) delete batch;
    }
    trace_counter(TraceCounter::kReading, asked_for_);
    // Wakes workers once per chunk, not for each of its hundreds of neurons.
    if (waited_for || (were_asked_for && asked_for_ == 0) || under_way_ == 0) common_.mutex.tell();
    sink_.some_over();
  }
}

}  // namespace pi2
