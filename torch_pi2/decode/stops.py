"""``Stops``: text that ends before that of some strings which is whole first."""

from __future__ import annotations

from collections.abc import Sequence


def begun(text: str, marks: Sequence[str]) -> int:
    """Letters at the end of ``text`` that may be the beginning of one of ``marks``."""
    ends = (n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n]))
    return max(ends, default=0)


class Stops:
    """Text comes in pieces, however it is cut. ``export/runner/stops.cc`` does the same.

    Attributes:
        reached: whether one of ``strings`` has come: what follows is nobody's.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings, self._held, self.reached = tuple(strings), "", False

    def add(self, piece: str) -> str:
        """What of it, and of what was held back before, is certain: no stop string begins in it."""
        if self.reached:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._strings if (at := text.find(stop)) >= 0]
        if found:
            self.reached, self._held = True, ""
            return text[: min(found)[1]]
        certain = len(text) - begun(text, self._strings)
        self._held = text[certain:]
        return text[:certain]

    def rest(self) -> str:
        """At the end: what was held back."""
        held, self._held = self._held, ""
        return held
