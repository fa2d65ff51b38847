"""``Text``: tokens that come one by one as text, which ends before the first of some stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch_pi2.decode.stops import Stops


class Text:
    """What is sure of a text so far.

    Held back are tokens that are a part of a character, and what may be the beginning of a stop string.

    Args:
        tokenizer: of Hugging Face.
        stops: strings before which the text ends.
        hidden: ids that have no text; None: those that the tokenizer calls special.
        before: ids that stand before it, on which its first space may depend.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        hidden: Collection[int] | None = None,
        before: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._stops, self._hidden = tokenizer, Stops(stops), hidden
        self._ids = list(before)
        self._from, self._to = 0, len(before)  # ids whose text is known begins and ends here

    @property
    def stopped(self) -> bool:
        """Whether one of the stop strings has come: what follows is nobody's."""
        return self._stops.reached

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
        return self._stops.add(whole[len(known) :])

    def end(self) -> str:
        """The rest: no token follows."""
        if self.stopped:
            return ""
        known, whole = self._decode(self._ids[self._from : self._to]), self._decode(self._ids[self._from :])
        self._from = self._to = len(self._ids)
        return self._stops.add(whole[len(known) :]) + self._stops.rest()

    def _decode(self, ids: list[int]) -> str:
        if self._hidden is not None:
            ids = [token for token in ids if token not in self._hidden]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._hidden is None)
        return text
