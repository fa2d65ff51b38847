"""``Text``: tokens that come one by one as text, which ends before the first of some stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


def begun(text: str, marks: Sequence[str]) -> int:
    """Letters at the end of ``text`` that may be the beginning of one of ``marks``."""
    ends = (n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n]))
    return max(ends, default=0)


class Text:
    """What is sure of a text so far.

    Held back are tokens that are a part of a character, and what may be the beginning of a stop string.

    Args:
        tokenizer: of Hugging Face.
        stops: strings before which the text ends.
        hidden: ids that have no text; None: those that the tokenizer calls special.
        before: ids that stand before it, on which its first space may depend.

    Attributes:
        stopped: whether one of them has come: what follows is nobody's.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        hidden: Collection[int] | None = None,
        before: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._stops, self._hidden, self.stopped = tokenizer, tuple(stops), hidden, False
        self._ids = list(before)
        self._from, self._to = 0, len(before)  # ids whose text is known begins and ends here
        self._held = ""

    def add(self, token: int) -> str:
        """What is sure now, besides what was before."""
        if self.stopped:
            return ""
        self._ids.append(token)
        # text of a token depends on the ones before it (spaces); a character of several is U+FFFD until it is whole
        known, whole = self._decode(self._ids[self._from : self._to]), self._decode(self._ids[self._from :])
        if whole.endswith("\ufffd"):
            return ""
        self._from, self._to = self._to, len(self._ids)
        return self._sure(whole[len(known) :])

    def end(self) -> str:
        """The rest: no token follows."""
        if self.stopped:
            return ""
        known, whole = self._decode(self._ids[self._from : self._to]), self._decode(self._ids[self._from :])
        self._from = self._to = len(self._ids)
        text = self._sure(whole[len(known) :]) + self._held
        self._held = ""
        return text

    def _decode(self, ids: list[int]) -> str:
        if self._hidden is not None:
            ids = [token for token in ids if token not in self._hidden]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._hidden is None)
        return text

    def _sure(self, more: str) -> str:
        text = self._held + more
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = begun(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
