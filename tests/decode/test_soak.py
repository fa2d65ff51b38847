"""Models over stores for hours, in counts: answers, whole and cancelled, while budgets change; nothing leaks.

``PI2_SOAK_ANSWERS``: how many there are after a warm-up (twenty minutes have some three thousand; its default is half a
minute). Tokens and caches are checked as they come, in tests/helpers/soaking.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import soaking
from shared import shared_folder

_MIB = 1 << 20
#: Of memory: what a process may have more than budgets say (heap that is not given back; two answers at once are made
#: by models that are loaded besides), and more than after the warm-up: heap in pieces, and for each answer what Python
#: keeps of a model that was loaded for it. An answer has some 20 tokens.
ALLOWED, MORE, MORE_EACH = 32 * _MIB, 4 * _MIB, 4096


def soaked(folder: Path, answers: int) -> dict[str, Any]:
    command = [sys.executable, soaking.__file__, str(folder), str(answers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.long
def test_an_hour_of_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    answers = int(os.environ.get("PI2_SOAK_ANSWERS", "80"))
    found = soaked(shared_folder(tmp_path_factory, "decoded-for-long", soaking.make), answers)
    for done in found["done"].values():
        assert set(done) >= {"whole", "cancelled", "ended early", "fresh", "tokens"}
        assert done["budgets"] > answers / 4
    rounds = found["rounds"]
    first, *later = rounds[soaking.WARM_UP - 1 :]
    assert later
    for after in later:
        assert after["threads"] <= first["threads"]
        assert after["files"] == first["files"]
        assert after["rss"] <= first["rss"] + MORE + MORE_EACH * answers
    for at in rounds:
        assert at["rss"] <= found["before"] + found["budgets"] + ALLOWED
        assert at["peak"] <= found["before"] + 2 * found["most"] + ALLOWED
