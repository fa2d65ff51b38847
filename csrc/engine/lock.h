// The lock of an open store and the queue of its calls.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "base/thread_annotations.h"

namespace pi2 {

// The capability that every part of the engine names in its annotations. Parts of two stores never meet, so one is
// enough.
struct PI2_CAPABILITY("mutex") StoreLock {};
inline constexpr StoreLock kLock{};

class StoreMutex {
 public:
  void lock() PI2_ACQUIRE(kLock) PI2_NOT_ANALYSED { mutex_.lock(); }
  void unlock() PI2_RELEASE(kLock) PI2_NOT_ANALYSED { mutex_.unlock(); }

  // Releases the lock while waiting.
  void wait(std::condition_variable* condition) PI2_REQUIRES(kLock) {
    std::unique_lock<std::mutex> lock(mutex_, std::adopt_lock);
    condition->wait(lock);
    (void)lock.release();
  }
  // Releases the lock until something has changed; until `give_up` (see Common::spin_until) it yields, then it sleeps.
  void wait_for_news(std::chrono::steady_clock::time_point give_up = {}) PI2_REQUIRES(kLock) {
    using Clock = std::chrono::steady_clock;
    const std::uint64_t seen = news_.load();
    if (Clock::now() >= give_up) return wait(&changed_);
    unlock();
    while (news_.load(std::memory_order_relaxed) == seen && Clock::now() < give_up) std::this_thread::yield();
    lock();
  }

  void tell() {
    news_.fetch_add(1);
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<std::uint64_t> news_{0};  // number of tell() calls
};

class PI2_SCOPED_CAPABILITY Locked {
 public:
  explicit Locked(StoreMutex& mutex) PI2_ACQUIRE(kLock) PI2_NOT_ANALYSED : mutex_(mutex) { mutex_.lock(); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  ~Locked() PI2_RELEASE() PI2_NOT_ANALYSED { mutex_.unlock(); }

 private:
  StoreMutex& mutex_;
};

// One call at a time, in order of arrival: whoever waits for the turn holds the door, so nobody overtakes.
class Turns {
 public:
  std::unique_lock<std::mutex> take() {
    const std::lock_guard<std::mutex> first(door_);
    return std::unique_lock<std::mutex>(turn_);
  }

 private:
  std::mutex door_, turn_;
};

}  // namespace pi2
