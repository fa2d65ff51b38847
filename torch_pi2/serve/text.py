"""``Text``: tokens that come one by one as text, which ends before the first of some stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Text:
    """What is sure of a text so far.

    Held back are tokens that are a part of a character, and what may be the beginning of a stop string.

    Args:
        tokenizer: of Hugging Face.
        stops: strings before which the text ends.

    Attributes:
        stopped: whether one of them has come: what follows is nobody's.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops, self.stopped = tokenizer, tuple(stops), False
        self._ids: list[int] = []
        self._from = self._to = 0  # ids whose text is known begins and ends here
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
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _sure(self, more: str) -> str:
        text = self._held + more
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
