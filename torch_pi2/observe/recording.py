"""What :class:`torch_pi2.trace` and :class:`torch_pi2.record_accesses` share: recording within a ``with`` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

from torch_pi2.errors import Pi2Error


class Recording(ABC):
    """Recorded from ``start`` to ``stop``, which writes a file; or within a ``with`` block."""

    @abstractmethod
    def start(self) -> Self:
        """Begin to record."""

    @abstractmethod
    def stop(self) -> Path:
        """End recording, write the file and return its path."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except Pi2Error as unwritten:
            if error is None:
                raise
            error.add_note(str(unwritten))  # what the block raised matters more
