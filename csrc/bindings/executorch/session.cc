#include "bindings/executorch/session.h"

#include <chrono>
#include <map>
#include <mutex>
#include <new>
#include <tuple>

#include "base/convert.h"

namespace pi2::et {
namespace {

using Key = std::tuple<const void*, std::string, const Store*, std::uint32_t>;

std::mutex mutex;

std::multimap<Key, std::weak_ptr<Session>>& sessions() {
  static auto* const all = new std::multimap<Key, std::weak_ptr<Session>>();  // never destroyed: see stores
  return *all;
}

}  // namespace

std::shared_ptr<Session> Session::of(const void* loader, const std::string& method, const Blob& blob,
                                     const std::shared_ptr<Store>& store, Problem* problem) {
  const Key key(loader, method, store.get(), blob.queue);
  const bool submit = blob.role == Role::kSubmit;
  std::vector<std::shared_ptr<Session>> found, others;  // the last owner of one may be this: not to go with the lock
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto at = sessions().begin(); at != sessions().end();) {
    std::shared_ptr<Session> session = at->second.lock();
    if (session != nullptr && at->first == key) found.push_back(session);
    at = session == nullptr ? sessions().erase(at) : std::next(at);
    if (session != nullptr) others.push_back(std::move(session));
  }
  for (const std::shared_ptr<Session>& session : found) {
    bool& taken = submit ? session->has_submit_ : session->has_collect_;
    if (taken) continue;
    if (session->blob_.layer != blob.layer || session->blob_.hidden != blob.hidden) {
      *problem = et::problem(Fault::kProgram, "queue " + std::to_string(blob.queue) + " of method " + method,
                             "the two calls of one layer",
                             "layers " + std::to_string(session->blob_.layer) + " and " + std::to_string(blob.layer),
                             "Export the model again.");
      return nullptr;
    }
    taken = true;
    return session;
  }
  auto made = std::make_shared<Session>();
  made->blob_ = blob;
  made->store_ = store;
  (submit ? made->has_submit_ : made->has_collect_) = true;
  sessions().emplace(key, made);
  return made;
}

Session::~Session() { forget(); }

void Session::attach(std::shared_ptr<Layer> layer, int threads) {
  layer_ = std::move(layer);
  engine_ = &store_->engine(threads);
}

void Session::forget() {
  if (begun_) engine_->end(this, false);
  begun_ = false;
}

// Runs on the conductor thread, where nothing catches exceptions: compute() throws nothing.
void Session::run(const ParallelFor& parallel) {
  problem_ = layer_->compute(x_TH_.data(), y_TH_.data(), DType::kF32, tokens_, parallel, &stats_);
}

Problem Session::submit(const void* x, DType dtype, std::int64_t tokens) {
  forget();
  try {
    const auto count = static_cast<std::size_t>(tokens * blob_.hidden);
    x_TH_.resize(count);
    y_TH_.resize(count);
    row_H_.resize(static_cast<std::size_t>(blob_.hidden));
  } catch (const std::bad_alloc&) {
    return no_memory("tokens to submit");
  }
  widen(x, dtype, x_TH_.data(), tokens * blob_.hidden);
  tokens_ = tokens;
  problem_ = {};
  stats_ = {};
  engine_->begin(this);
  begun_ = true;
  return {};
}

Problem Session::collect(const void* h, void* out, DType dtype, std::int64_t tokens, CallStats* stats,
                         std::int64_t* submit_wait_ns) {
  const std::string what = "collecting layer " + std::to_string(blob_.layer);
  if (!begun_)
    return problem(Fault::kState, what, "that it was submitted before", "nothing submitted", "Execute whole methods.");
  const auto start = std::chrono::steady_clock::now();
  engine_->end(this, true);
  begun_ = false;
  const std::int64_t waited_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
  store_->count_submit_wait(waited_ns);
  if (stats != nullptr) *stats = stats_;
  if (submit_wait_ns != nullptr) *submit_wait_ns = waited_ns;
  if (problem_.fault == Fault::kMemory) return no_memory(what);
  if (problem_) return problem_;
  if (tokens != tokens_)
    return problem(Fault::kArgument, what, std::to_string(tokens_) + " tokens, as submitted", std::to_string(tokens),
                   "Export the model again.");
  const std::int64_t bytes = row_bytes(dtype, blob_.hidden);
  for (std::int64_t t = 0; t < tokens; ++t) {
    widen(static_cast<const char*>(h) + t * bytes, dtype, row_H_.data(), blob_.hidden);
    const float* y = y_TH_.data() + t * blob_.hidden;
    for (std::size_t k = 0; k < row_H_.size(); ++k) row_H_[k] += y[k];
    narrow(row_H_.data(), static_cast<char*>(out) + t * bytes, dtype, blob_.hidden);
  }
  return {};
}

}  // namespace pi2::et
