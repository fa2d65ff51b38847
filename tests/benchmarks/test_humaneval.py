"""Programs that models wrote, in their limits; where an answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.humaneval import answer, solved

CHECK = "\n\ndef check(found):\n    assert found(1) == 1\n"


@pytest.mark.parametrize(
    ("body", "right"),
    [
        ("return x", True),
        ("print('a' * 100); return x", True),
        ("return 2", False),
        ("import os; os._exit(0)", False),
        ("open('x', 'w').write('a'); return x", False),
        ("bytearray(2 << 30); return x", False),
        ("import os; os.fork() or os._exit(0); return x", False),
        ("syntax error", False),
    ],
)
def test_programs_run_in_limits(body: str, right: bool) -> None:
    assert solved(f"def f(x):\n    {body}{CHECK}", "f") == right


@pytest.mark.slow
def test_programs_that_never_end_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.humaneval._SECONDS", 1)
    for body in ("while True: pass", "import time; time.sleep(100)"):
        assert not solved(f"def f(x):\n    {body}{CHECK}", "f")


class _Letters:
    """A tokenizer of letters, with ``|`` as its special token."""

    def encode(self, text: str) -> Any:
        return SimpleNamespace(ids=list(map(ord, text)))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {ord("|"): SimpleNamespace(special=True), ord("t"): SimpleNamespace(special=False)}


@pytest.mark.parametrize(
    ("text", "tokens", "wanted"),
    [("  return x|more", 99, "  return x"), ("a\nb\ndef c", 99, "a\nb"), ("abcdef", 3, "abc"), ("a\n#", 3, "a")],
)
def test_an_answer_ends_at_a_special_token_or_the_next_definition(text: str, tokens: int, wanted: str) -> None:
    fed: list[tuple[int, int]] = []

    def step(ids: Sequence[int], start: int) -> int:
        fed.append((start, len(ids)))
        return ord(text[len(fed) - 1])

    assert answer(step, _Letters(), "def", tokens) == wanted
    assert fed == [(0, 3), *((3 + i, 1) for i in range(len(fed) - 1))]
