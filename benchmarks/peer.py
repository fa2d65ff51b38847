"""Another engine in a process of its own, which stays loaded while rounds alternate and waits on a pipe in between.

Each line is one JSON object, in both directions. A peer is a module whose ``load(settings)`` returns a function that
runs one round; ``serve`` is its main function, :class:`Peer` the other end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from torch_pi2.base.package import how_to_install
from torch_pi2.errors import LibraryMissingError, Pi2Error

#: A round of (tokens of the prompt, tokens of the answer, sequences).
Round = Callable[[int, int, int], dict[str, Any]]
Load = Callable[[Mapping[str, Any]], tuple[dict[str, Any], Round]]


class PeerError(Pi2Error):
    """A peer engine ended, or could not load its model."""


class Peer:
    """A running peer.

    Args:
        module: e.g. ``benchmarks.peer_llama``.
        settings: JSON for its ``load``.
        before: prefix of the command. env: additional environment variables.

    Attributes:
        about: versions, bytes and settings, as the peer reports them.
        one_sequence: whether it supports batch size 1 only.

    Raises:
        PeerError, LibraryMissingError: it could not start; the message has the last line it wrote.
    """

    one_sequence = False

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        *,
        before: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._module = module
        # Environment as it is: libgomp's threads stop spinning some milliseconds after a round, and a "passive" wait
        # policy would slow the peer down.
        self._process = subprocess.Popen(
            [*before, sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | (env or {}),
        )
        try:
            self.about = self._ask(settings)
        except BaseException:
            self.close()
            raise

    def round(self, prompt: int, tokens: int, batch: int = 1) -> dict[str, Any]:
        """Run ``batch`` prompts and answers together; returns ``prompt_s``, ``decode_s`` and ``peak_rss_bytes``."""
        return self._ask({"prompt": prompt, "tokens": tokens, "batch": batch})

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            fix = "See its messages on standard error above; is there enough memory for it?"
            raise PeerError(self._module, expected="an answer", found=ended(self._process.wait()), fix=fix)
        answer: dict[str, Any] = json.loads(line)
        if "missing" in answer:
            expected, fix = "an installed package", how_to_install("bench")
            raise LibraryMissingError(answer["missing"], expected=expected, found=answer["error"], fix=fix)
        if "error" in answer:
            fix = "See its log on standard error."
            raise PeerError(self._module, expected="a loaded model", found=answer["error"], fix=fix)
        return answer

    def close(self) -> None:
        """End the process and give its memory back."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close() if self._process.stdin else None
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


def ended(code: int) -> str:
    """How a process ended, for errors; ``code`` as :mod:`subprocess` has it."""
    if code != -signal.SIGKILL:
        return f"its end with exit code {code}"
    return "its end by signal 9, as the system ends what takes more memory than there is or a cap allows"


def serve(load: Load) -> None:
    """Answer on standard output; what libraries print goes to standard error."""
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: Mapping[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        about, run_round = load(json.loads(sys.stdin.readline()))
    except ImportError as error:
        answer({"missing": getattr(error, "name", None) or "package", "error": str(error)})
        return
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    answer(about)
    for line in sys.stdin:
        question = json.loads(line)
        answer(run_round(question["prompt"], question["tokens"], question["batch"]))
