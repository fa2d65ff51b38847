"""Starts the ``torch-pi2`` command: outside the package, whose import takes seconds, so that Ctrl-C ends it quietly."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> int:
    """The command line's exit code; 130 if it is interrupted, from the first moment on."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # nohup: leave it so
        from torch_pi2.cli import main as run

        return run()
    signal.signal(signal.SIGINT, _stop)
    from torch_pi2.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _stop(_number: int, _frame: FrameType | None) -> None:
    """Nothing has been begun, and an exception would end up in whatever module is being imported."""
    os.write(2, b"torch-pi2: interrupted\n")
    os._exit(130)
