"""Signals: Ctrl-C and SIGTERM end a verb, and what it was writing is removed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def quiet_interrupts() -> Iterator[None]:
    """Ctrl-C ends the process at once, without a traceback from the module that is being imported."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # nohup: leave it so
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        os.write(2, b"torch-pi2: interrupted\n")
        os._exit(130)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """SIGTERM (from kill, timeout, a stopping container) raises SystemExit, so that verbs clean up as after Ctrl-C."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM:
            with contextlib.suppress(OSError):
                os.write(2, b"torch-pi2: ended by SIGTERM\n")
        raise
    finally:
        if signal.getsignal(signal.SIGTERM) is stop:  # else it is to be ignored until the process has ended
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
