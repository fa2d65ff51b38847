"""What a command of the command line returned."""

from __future__ import annotations

import json
from typing import Any


class Ran:
    """What a command returned, and its two streams."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on standard output; fails if there is anything beside it."""
        result = json.loads(self.out)
        assert isinstance(result, dict)
        assert self.out.count("\n") == 1
        return result
