#include "bindings/executorch/engine.h"

#include <algorithm>

#include "base/thread_name.h"

namespace pi2::et {

Engine::Engine(int threads) : pool_(std::max(1, threads)), conductor_([this] { conduct(); }) {
  name_thread(conductor_, "pi2-compute");
}

Engine::~Engine() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    waiting_.clear();
  }
  changed_.notify_all();
  conductor_.join();
}

void Engine::begin(Job* job) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(job);
  }
  changed_.notify_all();
}

void Engine::end(Job* job, bool wanted) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto at = [&] { return std::find(waiting_.begin(), waiting_.end(), job); };
  if (!wanted && at() != waiting_.end()) waiting_.erase(at());
  changed_.wait(lock, [&] { return running_ != job && at() == waiting_.end(); });
}

void Engine::conduct() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
    if (stop_) return;
    running_ = waiting_.front();
    waiting_.pop_front();
    lock.unlock();
    running_->run(pool_.parallel());
    lock.lock();
    running_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace pi2::et
