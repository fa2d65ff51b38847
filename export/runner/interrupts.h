// Signals that end what this program does, once what it writes is written.
#pragma once

#include <signal.h>

#include <iterator>

namespace pi2::runner {

// The signal that came while an Interruptible was there, or 0.
int interrupted();
void forget_interrupt();

// Returns once `fd` has something to read; false: a signal was noted, or comes while this waits.
bool wait_for_input(int fd);

// While it is there Ctrl-C, SIGTERM and SIGHUP are noted, and end a poll for input; a second one ends the program at
// once, as one does before. Signals that are ignored stay so.
class Interruptible {
 public:
  Interruptible();
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  // After the signal that was forgotten, the next one is noted again.
  void listen();

  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};

 private:
  struct sigaction before_[std::size(kSignals)];
};

}  // namespace pi2::runner
