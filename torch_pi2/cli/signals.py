"""What signals do to a verb: Ctrl-C and SIGTERM end it, and what it was writing is removed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def quiet_interrupts() -> Iterator[None]:
    """Ctrl-C ends the process: nothing has been begun, and an exception would end up in what is being imported."""
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
def ending() -> Iterator[None]:
    """SIGTERM (of kill, timeout, a container that ends) raises SystemExit, so that a verb cleans up as after Ctrl-C.

    Either is sent again where Python drops what its handler raised: in callbacks of weak references and in __del__.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def dropped(found: Any) -> None:
        number = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}.get(found.exc_type)
        if number is None:
            before(found)
        else:  # not here, where it would be dropped as well
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()

    before, sys.unraisablehook = sys.unraisablehook, dropped
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if default:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM:
            with contextlib.suppress(OSError):
                os.write(2, b"torch-pi2: ended by SIGTERM\n")
        raise
    finally:
        sys.unraisablehook = before
        if default and signal.getsignal(signal.SIGTERM) is stop:  # else it is to be ignored until the process has ended
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
