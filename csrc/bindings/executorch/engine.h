// The delegate's own threads: what is submitted is computed here while ExecuTorch goes on.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "pi2/thread_pool.h"

namespace pi2::et {

class Job {
 public:
  virtual ~Job() = default;
  virtual void run(const ParallelFor& parallel) = 0;  // does not throw
};

// One thread that conducts, one job after another, and a pool that helps it.
class Engine {
 public:
  explicit Engine(int threads);
  ~Engine();  // of what is still waiting nothing is computed
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void begin(Job* job);
  // Returns when the job is over. `wanted`: it is computed first; else it is taken back if it has not begun.
  void end(Job* job, bool wanted);

 private:
  void conduct();

  ThreadPool pool_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job*> waiting_;
  Job* running_ = nullptr;
  bool stop_ = false;
  std::thread conductor_;
};

}  // namespace pi2::et
