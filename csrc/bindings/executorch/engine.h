// The delegate's own threads: they compute submitted layers while ExecuTorch goes on.
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

// A conductor thread that runs one job after the other, with a thread pool.
class Engine {
 public:
  explicit Engine(int threads);
  ~Engine();  // waiting jobs are dropped
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void begin(Job* job);
  // Returns when the job has ended. `wanted`: computes it first; otherwise withdraws it if it has not started.
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
