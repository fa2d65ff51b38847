#include "interrupts.h"

#include <poll.h>

#include <atomic>

namespace pi2::runner {
namespace {

std::atomic<int> came = 0;

}  // namespace

int interrupted() { return came; }
void forget_interrupt() { came = 0; }

// A signal that arrives before the wait ends it, too.
bool wait_for_input(int fd) {
  sigset_t noted, before;
  sigemptyset(&noted);
  for (const int signal : Interruptible::kSignals) sigaddset(&noted, signal);
  pthread_sigmask(SIG_BLOCK, &noted, &before);
  pollfd input{fd, POLLIN, 0};
  const bool there = interrupted() == 0 && ppoll(&input, 1, nullptr, &before) >= 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return there;
}

Interruptible::Interruptible() {
  for (std::size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], nullptr, &before_[i]);
  listen();
}

Interruptible::~Interruptible() {
  for (std::size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &before_[i], nullptr);
}

void Interruptible::listen() {
  struct sigaction action = {};
  action.sa_handler = [](int signal) {
    if (came == 0 || came == SIGINT)
      came = signal;  // Ctrl-C may only end an answer: keeps a signal that ends the program
  };
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  for (std::size_t i = 0; i < std::size(kSignals); ++i) {
    if (before_[i].sa_handler == SIG_DFL)
      sigaction(kSignals[i], &action, nullptr);  // ignored signals (nohup) stay ignored
  }
}

}  // namespace pi2::runner
