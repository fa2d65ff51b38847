// Signals end the program after its output is written.
#pragma once

#include <signal.h>

#include <iterator>

namespace pi2::runner {

// The signal received during the lifetime of an Interruptible, or 0.
int interrupted();
void forget_interrupt();

// Waits until `fd` is readable; false: a signal was received before or meanwhile.
bool wait_for_input(int fd);

// During its lifetime Ctrl-C, SIGTERM and SIGHUP are recorded and end a wait for input; a second signal ends the
// program at once. Ignored signals stay ignored.
class Interruptible {
 public:
  Interruptible();
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  // Forgets a signal and records the next one.
  void listen();

  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};

 private:
  struct sigaction before_[std::size(kSignals)];
};

}  // namespace pi2::runner
