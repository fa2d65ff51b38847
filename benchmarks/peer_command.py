"""A program like llama-bench as a peer: llama.cpp's own, those of its forks, whatever takes and prints the same.

Options and JSON: https://github.com/ggml-org/llama.cpp/blob/master/tools/llama-bench/README.md
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peer import PeerError, ended
from torch_pi2.errors import ConfigError

#: Of what a program printed instead, so many characters are shown.
_SHOWN = 80


def program(command: str) -> list[str]:
    """Words of ``command``, a program and perhaps options of its own. Raises ConfigError: it is no command line, or
    there is no such program.
    """
    try:
        words = shlex.split(command)
        found = f"no program {words[0]!r}" if shutil.which(words[0]) is None else ""
    except (ValueError, IndexError) as error:
        words, found = [], f"{command!r} ({error})"
    if found:
        expected = "a program like llama-bench, perhaps with options"
        raise ConfigError("--peer-command", expected=expected, found=found, fix="Build it, or give its path.")
    return words


class CommandPeer:
    """The program, run anew in each round: it loads its file, warms up, times a prompt and an answer of one sequence.

    The answer does not follow the prompt but has an empty cache, as llama-bench does it (if ``-d`` is not among the
    options): its attention has less to read than that of others. Page faults of a round are those of loading too.

    Args:
        command: as of :func:`program`.
        file: model file. threads: what it shall compute with.

    Attributes:
        name: file name of the program with its own options, and after a round its build.
        about: as of :class:`benchmarks.peer.Peer`, after a round.
        one_sequence: it takes no more at once.
    """

    one_sequence = True

    def __init__(self, command: str, file: Path, threads: int, _context: int = 0) -> None:
        self._words = program(command)
        self._file, self._threads = file, threads
        self._plain_name = self.name = " ".join([Path(self._words[0]).name, *self._words[1:]])
        self.about: dict[str, Any] = {}

    def round(self, prompt: int, tokens: int, _one: int = 1) -> dict[str, Any]:
        """As of :class:`benchmarks.peer.Peer`. Raises PeerError: it failed, or printed not what llama-bench does."""
        sizes = {"-t": self._threads, "-p": prompt, "-n": tokens, "-r": 1}
        words = [*self._words, "-m", str(self._file), *(str(w) for pair in sizes.items() for w in pair), "-o", "json"]
        with (
            tempfile.TemporaryFile("w+", errors="replace") as out,
            tempfile.TemporaryFile("w+", errors="replace") as log,
        ):
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=log)
            _, status, usage = os.wait4(process.pid, 0)  # its own memory, which subprocess does not tell
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            log.seek(0)
            printed, said = out.read(), log.read()
        if process.returncode:
            found = f"{ended(process.returncode)}: {(said.strip().splitlines() or ['(no words)'])[-1]}"
            raise PeerError(self.name, expected="exit code 0", found=found, fix=f"Run it by hand: {shlex.join(words)}")
        try:
            tests = json.loads(printed)
            prompt_s, decode_s = (self._seconds(tests, *test) for test in ((prompt, 0), (0, tokens)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PeerError(
                self.name,
                expected=f"JSON as of llama-bench: one test of a prompt of {prompt} and one of an answer of {tokens} "
                f"tokens with {self._threads} threads, each with avg_ns",
                found=f"{printed.strip()[:_SHOWN]!r} ({type(error).__name__}: {error})",
                fix=f"Run it by hand: {shlex.join(words)}",
            ) from error
        self._describe(tests[0])
        memory = {"peak_rss_bytes": usage.ru_maxrss * 1024, "major_faults": usage.ru_majflt}
        return {"prompt_s": prompt_s, "decode_s": decode_s, **memory}

    def _seconds(self, tests: list[dict[str, Any]], prompt: int, tokens: int) -> float:
        asked = {"n_prompt": prompt, "n_gen": tokens, "n_threads": self._threads}
        found = [test for test in tests if asked.items() <= test.items()]
        if len(found) != 1:
            raise ValueError(f"{len(found)} tests with {asked}")
        seconds = float(found[0]["avg_ns"]) / 1e9
        if not 0 < seconds < math.inf:
            raise ValueError(f"avg_ns {found[0]['avg_ns']}")
        return seconds

    def _describe(self, test: dict[str, Any]) -> None:
        if "build_commit" in test:
            self.name = f"{self._plain_name}, build {test['build_commit']} ({test.get('build_number', '')})"
        self.about = {
            "engine": self.name,
            "weights": f"{self._file.name}: {test.get('model_type', 'model type not told')}",
            "bytes": self._file.stat().st_size,
            "threads": self._threads,
            "answer_after": test.get("n_depth", 0),
        }

    def close(self) -> None:
        """Nothing runs between rounds."""
